//! A YAML text as a tree in which every node knows its place, within bounds that hold before anything else
//! looks at it.
//!
//! Aliases share the node that they name, so a bomb of aliases costs nothing here; [`Node::size`] is what it
//! would cost whoever walks it, and is bounded. Invariants of a [`Document`] that was read:
//! - it is one document of at most [`BYTES_MAX`] bytes and [`SIZE_MAX`] nodes with every alias expanded;
//! - it is at most [`DEPTH_MAX`] deep, aliases included, so that walking it may recurse.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use serde_saphyr::granit_parser::{Event, Marker, Parser, ScalarStyle};

use crate::config::error::Place;

/// Largest text, in bytes: a file of 4,096 engines with labels is a third of it.
pub(crate) const BYTES_MAX: usize = 1 << 20;
/// Most nodes, aliases expanded. A text within [`BYTES_MAX`] that says everything once stays below it.
const SIZE_MAX: usize = 200_000;
/// Deepest nesting; the configuration's own is below 12.
const DEPTH_MAX: usize = 32;
/// Most problems that are told of one text.
pub(crate) const PROBLEMS_MAX: usize = 100;

/// One text.
#[derive(Debug)]
pub(crate) struct Document {
    pub root: Rc<Node>,
    /// Keys that stand in their map already, each with the place of the first.
    pub repeated: Vec<(Place, String, Place)>,
}

/// A value and where it stands.
#[derive(Debug)]
pub(crate) struct Node {
    pub place: Place,
    pub content: Content,
    /// Nodes in it and below, itself included, with every alias expanded.
    size: usize,
    depth: usize,
}

/// What a node is.
#[derive(Debug)]
pub(crate) enum Content {
    /// Anything without a structure.
    Scalar {
        text: String,
        /// Written without quotes: it may be a number, `true` or nothing.
        plain: bool,
    },
    List(Vec<Rc<Node>>),
    /// In the order of the text; keys are distinct.
    Map(Vec<(Key, Rc<Node>)>),
}

/// A key and where it stands.
#[derive(Clone, Debug)]
pub(crate) struct Key {
    pub name: String,
    pub place: Place,
}

/// A text that is not one document within the bounds.
#[derive(Debug)]
pub(crate) struct Unreadable {
    pub place: Place,
    pub what: String,
}

impl Node {
    fn new(place: Place, content: Content) -> Self {
        let (mut size, mut depth) = (1_usize, 0);
        let mut count = |node: &Node| {
            size = size.saturating_add(node.size);
            depth = depth.max(node.depth);
        };
        match &content {
            Content::Scalar { .. } => {}
            Content::List(items) => items.iter().for_each(|item| count(item)),
            Content::Map(entries) => entries.iter().for_each(|(_, value)| count(value)),
        }
        Self { place, content, size, depth: depth + 1 }
    }

    /// The value of a key.
    pub(crate) fn get(&self, name: &str) -> Option<&Rc<Node>> {
        let Content::Map(entries) = &self.content else { return None };
        entries.iter().find(|(key, _)| key.name == name).map(|(_, value)| value)
    }

    /// Nothing was written, or `null`.
    pub(crate) fn is_null(&self) -> bool {
        matches!(&self.content, Content::Scalar { text, plain: true }
            if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL"))
    }

    /// The place of what a path like `models[0].decode.url` names, or of the last part of it that is there. A
    /// map or a list stands where its key does.
    pub(crate) fn place_of(&self, path: &str) -> Place {
        let (mut node, mut place) = (self, self.place);
        for part in path.split(['.', '[']) {
            let part = part.strip_suffix(']').unwrap_or(part);
            let next = match &node.content {
                Content::Map(entries) => entries.iter().find(|(key, _)| key.name == part),
                Content::List(items) => {
                    let Some(item) = part.parse::<usize>().ok().and_then(|at| items.get(at)) else { break };
                    (node, place) = (item, item.place);
                    continue;
                }
                Content::Scalar { .. } => None,
            };
            let Some((key, value)) = next else { break };
            let scalar = matches!(value.content, Content::Scalar { .. });
            (node, place) = (value, if scalar { value.place } else { key.place });
        }
        place
    }

    /// The path of the value that stands at a place; of several the innermost one, as of a list and its first item.
    pub(crate) fn path_at(&self, place: Place) -> Option<String> {
        let below = |name: String, node: &Rc<Node>| {
            let path = node.path_at(place).or_else(|| (node.place == place).then(String::new))?;
            Some(if path.is_empty() || path.starts_with('[') {
                name + &path
            } else {
                format!("{name}.{path}")
            })
        };
        match &self.content {
            Content::Scalar { .. } => None,
            Content::List(items) => {
                items.iter().enumerate().find_map(|(at, item)| below(format!("[{at}]"), item))
            }
            Content::Map(entries) => entries.iter().find_map(|(key, value)| below(key.name.clone(), value)),
        }
    }
}

/// A collection whose end has not been read.
enum Open {
    List {
        place: Place,
        anchor: usize,
        items: Vec<Rc<Node>>,
    },
    Map {
        place: Place,
        anchor: usize,
        entries: Vec<(Key, Rc<Node>)>,
        names: HashMap<String, Place>,
        merged: Vec<Rc<Node>>,
        key: Option<Key>,
    },
}

struct Builder {
    open: Vec<Open>,
    anchors: HashMap<usize, Rc<Node>>,
    repeated: Vec<(Place, String, Place)>,
    root: Option<Rc<Node>>,
    documents: usize,
}

impl Document {
    /// Reads a text.
    pub(crate) fn read(text: &str) -> Result<Self, Unreadable> {
        let start = Place { line: 1, column: 1 };
        if text.len() > BYTES_MAX {
            let what = format!("{} bytes exceed the limit of {BYTES_MAX}", text.len());
            return Err(Unreadable { place: start, what });
        }
        let mut builder = Builder {
            open: Vec::new(),
            anchors: HashMap::new(),
            repeated: Vec::new(),
            root: None,
            documents: 0,
        };
        let mut parser = Parser::new_from_str(text);
        while let Some(event) = parser.next_event() {
            let (event, span) = event.map_err(|error| Unreadable {
                place: place(error.marker()),
                what: format!("not YAML: {}", error.info()),
            })?;
            let end = matches!(event, Event::StreamEnd);
            builder.take(event, place(&span.start))?;
            if end {
                break;
            }
        }
        match builder.root {
            Some(root) if !root.is_null() => Ok(Self { root, repeated: builder.repeated }),
            _ => Err(Unreadable { place: start, what: "the file is empty".into() }),
        }
    }
}

impl Builder {
    fn take(&mut self, event: Event<'_>, place: Place) -> Result<(), Unreadable> {
        let refused = |what: &str| Err(Unreadable { place, what: what.to_owned() });
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return refused("a second document, expected one");
                }
            }
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                let node = Node::new(place, Content::Scalar { text: text.into_owned(), plain });
                self.close(Rc::new(node), anchor)?;
            }
            Event::Alias(anchor) => match self.anchors.get(&anchor).cloned() {
                Some(node) => self.close(node, 0)?,
                None => return refused("an alias inside the value that it refers to"),
            },
            Event::SequenceStart(_, anchor, _) => {
                self.opened(Open::List { place, anchor, items: Vec::new() }, place)?;
            }
            Event::MappingStart(_, anchor, _) => {
                let (entries, names, merged) = (Vec::new(), HashMap::new(), Vec::new());
                self.opened(Open::Map { place, anchor, entries, names, merged, key: None }, place)?;
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(Open::List { place, anchor, items }) => {
                    self.close(Rc::new(Node::new(place, Content::List(items))), anchor)?;
                }
                Some(Open::Map { place, anchor, mut entries, merged, .. }) => {
                    merge(&mut entries, &merged);
                    self.close(Rc::new(Node::new(place, Content::Map(entries))), anchor)?;
                }
                None => return refused("an end without a beginning"),
            },
            _ => {}
        }
        Ok(())
    }

    fn opened(&mut self, open: Open, place: Place) -> Result<(), Unreadable> {
        if self.open.len() >= DEPTH_MAX {
            return Err(Unreadable { place, what: format!("nested deeper than {DEPTH_MAX}") });
        }
        self.open.push(open);
        Ok(())
    }

    /// A node is complete: it goes where it belongs.
    fn close(&mut self, node: Rc<Node>, anchor: usize) -> Result<(), Unreadable> {
        if node.size > SIZE_MAX || node.depth > DEPTH_MAX {
            let what = format!("more than {SIZE_MAX} values, or deeper than {DEPTH_MAX}, with its aliases");
            return Err(Unreadable { place: node.place, what });
        }
        if anchor > 0 {
            self.anchors.insert(anchor, Rc::clone(&node));
        }
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(Open::List { items, .. }) => items.push(node),
            Some(Open::Map { entries, names, merged, key, .. }) => match key.take() {
                None => {
                    let Content::Scalar { text, .. } = &node.content else {
                        return Err(Unreadable { place: node.place, what: "a key must be a word".into() });
                    };
                    *key = Some(Key { name: text.clone(), place: node.place });
                }
                Some(key) if key.name == "<<" => match &node.content {
                    Content::List(items) => merged.extend(items.iter().cloned()),
                    _ => merged.push(node),
                },
                Some(key) => match names.get(&key.name) {
                    Some(&first) if self.repeated.len() < PROBLEMS_MAX => {
                        self.repeated.push((key.place, key.name, first));
                    }
                    Some(_) => {}
                    None => {
                        names.insert(key.name.clone(), key.place);
                        entries.push((key, node));
                    }
                },
            },
        }
        Ok(())
    }
}

/// `<<`: entries of other maps that this one does not have itself; the first that has a key wins.
fn merge(entries: &mut Vec<(Key, Rc<Node>)>, merged: &[Rc<Node>]) {
    let mut known: HashSet<String> = entries.iter().map(|(key, _)| key.name.clone()).collect();
    for map in merged {
        let Content::Map(others) = &map.content else { continue };
        for (key, value) in others {
            if known.insert(key.name.clone()) {
                entries.push((key.clone(), Rc::clone(value)));
            }
        }
    }
}

fn place(marker: &Marker) -> Place {
    Place { line: marker.line(), column: marker.col() + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Document::read(text).expect_err("it must be refused").what
    }

    #[test]
    fn every_key_and_value_knows_its_place() {
        let document = Document::read("a:\n  - b: 1\n    c: {d: x}\n").expect("it is YAML");
        for (path, line, column) in [
            ("a", 1, 1),
            ("a[0]", 2, 5),
            ("a[0].c", 3, 5),
            ("a[0].c.d", 3, 12),
            ("a[0].c.nothing", 3, 5),
            ("a[7]", 1, 1),
        ] {
            assert_eq!(document.root.place_of(path), Place { line, column }, "{path}");
        }
    }

    #[test]
    fn a_key_that_stands_twice_is_told_with_both_places() {
        let document = Document::read("a: 1\nb: {c: 1, c: 2}\na: 2\n").expect("it is YAML");
        let told: Vec<_> =
            document.repeated.iter().map(|(at, name, first)| (at.line, name.as_str(), first.line)).collect();
        assert_eq!(told, [(2, "c", 2), (3, "a", 1)]);
    }

    #[test]
    fn a_bomb_of_aliases_is_refused_before_it_is_expanded() {
        let mut text = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n".to_owned();
        for n in 1..12 {
            let m = n - 1;
            text += &format!(
                "a{n}: &a{n} [*a{m}, *a{m}, *a{m}, *a{m}, *a{m}, *a{m}, *a{m}, *a{m}, *a{m}, *a{m}]\n"
            );
        }
        assert!(refused(&text).contains("with its aliases"));
    }

    #[test]
    fn what_is_too_large_too_deep_or_endless_is_refused() {
        assert!(refused(&"#".repeat(BYTES_MAX + 1)).contains("bytes"));
        assert!(
            refused(&format!("a: {}1{}", "[".repeat(DEPTH_MAX), "]".repeat(DEPTH_MAX))).contains("deeper")
        );
        assert!(refused("a: &a [*a]").contains("alias"));
        assert!(refused("a: *nobody").contains("not YAML"));
        assert!(refused("a: [1").contains("not YAML"));
        assert!(refused("a: 1\n---\nb: 1\n").contains("second document"));
        assert!(refused("").contains("empty"));
        assert!(refused("# only words\n").contains("empty"));
        let chain: String =
            (1..40).fold("a0: &a0 [x]\n".into(), |text, n| format!("{text}a{n}: &a{n} [*a{}]\n", n - 1));
        assert!(refused(&chain).contains("deeper"), "depth counts through aliases");
    }

    #[test]
    fn merged_maps_give_what_the_map_itself_does_not_say() {
        let document = Document::read("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\n").expect("it is YAML");
        let y = document.root.get("y").expect("it is there");
        let text = |name: &str| match &y.get(name).expect(name).content {
            Content::Scalar { text, .. } => text.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!((text("a"), text("b")), ("1".into(), "3".into()));
    }
}
