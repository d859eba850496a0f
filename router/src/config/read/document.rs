//! A YAML text as a bounded tree in which every node has its position. The bounds hold before any other code reads the
//! tree.
//!
//! Aliases share the node that they name, so nested aliases take no memory here. [`YamlNode::size`] counts the nodes
//! that a walk visits, and is bounded. Invariants of a [`Document`]:
//! - it is one YAML document of at most [`BYTES_MAX`] bytes and [`SIZE_MAX`] nodes with every alias expanded;
//! - it is at most [`DEPTH_MAX`] deep, aliases included, so that a walk may recurse.

use std::collections::{HashMap, HashSet};
use std::rc::Rc;

use serde_saphyr::granit_parser::{Event, Marker, Parser, ScalarStyle};

use crate::config::error::SourcePosition;

/// Largest text, in bytes: a file of 4,096 engines with labels is a third of it.
pub(crate) const BYTES_MAX: usize = 1 << 20;
/// Most nodes, aliases expanded. A text within [`BYTES_MAX`] without aliases stays below it.
const SIZE_MAX: usize = 200_000;
/// Deepest nesting. The nesting of a configuration is below 12.
const DEPTH_MAX: usize = 32;
/// Most problems that are reported for one text.
pub(crate) const PROBLEMS_MAX: usize = 100;

/// The tree of one text.
#[derive(Debug)]
pub(crate) struct Document {
    pub root: Rc<YamlNode>,
    /// Repeated keys of a map, each with the position of the first.
    pub repeated: Vec<(SourcePosition, String, SourcePosition)>,
}

/// A value and its position.
#[derive(Debug)]
pub(crate) struct YamlNode {
    pub position: SourcePosition,
    pub content: NodeContent,
    /// Nodes in this subtree, itself included, with every alias expanded.
    size: usize,
    depth: usize,
}

/// The content of a node.
#[derive(Debug)]
pub(crate) enum NodeContent {
    /// A text, number, truth value or null.
    Scalar {
        text: String,
        /// Written without quotes: it may be a number, `true` or null.
        plain: bool,
    },
    List(Vec<Rc<YamlNode>>),
    /// In the order of the text; keys are distinct.
    Map(Vec<(MapKey, Rc<YamlNode>)>),
}

/// A key and its position.
#[derive(Clone, Debug)]
pub(crate) struct MapKey {
    pub name: String,
    pub position: SourcePosition,
}

/// Why a text is not one document within the bounds.
#[derive(Debug)]
pub(crate) struct DocumentError {
    pub position: SourcePosition,
    pub what: String,
}

impl YamlNode {
    fn new(position: SourcePosition, content: NodeContent) -> Self {
        let (mut size, mut depth) = (1_usize, 0);
        let mut count = |node: &YamlNode| {
            size = size.saturating_add(node.size);
            depth = depth.max(node.depth);
        };
        match &content {
            NodeContent::Scalar { .. } => {}
            NodeContent::List(items) => items.iter().for_each(|item| count(item)),
            NodeContent::Map(entries) => entries.iter().for_each(|(_, value)| count(value)),
        }
        Self { position, content, size, depth: depth + 1 }
    }

    /// The value of a key.
    pub(crate) fn get(&self, name: &str) -> Option<&Rc<YamlNode>> {
        let NodeContent::Map(entries) = &self.content else { return None };
        entries.iter().find(|(key, _)| key.name == name).map(|(_, value)| value)
    }

    /// Whether the node is empty or `null`.
    pub(crate) fn is_null(&self) -> bool {
        matches!(&self.content, NodeContent::Scalar { text, plain: true }
            if matches!(text.as_str(), "" | "~" | "null" | "Null" | "NULL"))
    }

    /// The position of the value at a path like `models[0].decode.url`, or of the last part of the path that exists.
    /// The position of a map or a list is that of its key.
    pub(crate) fn position_of(&self, path: &str) -> SourcePosition {
        let (mut node, mut position) = (self, self.position);
        for part in path.split(['.', '[']) {
            let part = part.strip_suffix(']').unwrap_or(part);
            let next = match &node.content {
                NodeContent::Map(entries) => entries.iter().find(|(key, _)| key.name == part),
                NodeContent::List(items) => {
                    let Some(item) = part.parse::<usize>().ok().and_then(|at| items.get(at)) else { break };
                    (node, position) = (item, item.position);
                    continue;
                }
                NodeContent::Scalar { .. } => None,
            };
            let Some((key, value)) = next else { break };
            let scalar = matches!(value.content, NodeContent::Scalar { .. });
            (node, position) = (value, if scalar { value.position } else { key.position });
        }
        position
    }

    /// The path of the value at a position. A list and its first item may share a position; the innermost value wins.
    pub(crate) fn path_at(&self, position: SourcePosition) -> Option<String> {
        let below = |name: String, node: &Rc<YamlNode>| {
            let path = node.path_at(position).or_else(|| (node.position == position).then(String::new))?;
            Some(if path.is_empty() || path.starts_with('[') {
                name + &path
            } else {
                format!("{name}.{path}")
            })
        };
        match &self.content {
            NodeContent::Scalar { .. } => None,
            NodeContent::List(items) => {
                items.iter().enumerate().find_map(|(at, item)| below(format!("[{at}]"), item))
            }
            NodeContent::Map(entries) => {
                entries.iter().find_map(|(key, value)| below(key.name.clone(), value))
            }
        }
    }
}

/// A collection whose end the parser has not reached.
enum OpenCollection {
    List {
        position: SourcePosition,
        anchor: usize,
        items: Vec<Rc<YamlNode>>,
    },
    Map {
        position: SourcePosition,
        anchor: usize,
        entries: Vec<(MapKey, Rc<YamlNode>)>,
        names: HashMap<String, SourcePosition>,
        merged: Vec<Rc<YamlNode>>,
        key: Option<MapKey>,
    },
}

struct DocumentBuilder {
    open: Vec<OpenCollection>,
    anchors: HashMap<usize, Rc<YamlNode>>,
    repeated: Vec<(SourcePosition, String, SourcePosition)>,
    root: Option<Rc<YamlNode>>,
    documents: usize,
}

impl Document {
    /// Reads a text.
    pub(crate) fn read(text: &str) -> Result<Self, DocumentError> {
        let start = SourcePosition { line: 1, column: 1 };
        if text.len() > BYTES_MAX {
            let what = format!("{} bytes exceed the limit of {BYTES_MAX}", text.len());
            return Err(DocumentError { position: start, what });
        }
        let mut builder = DocumentBuilder {
            open: Vec::new(),
            anchors: HashMap::new(),
            repeated: Vec::new(),
            root: None,
            documents: 0,
        };
        let mut parser = Parser::new_from_str(text);
        while let Some(event) = parser.next_event() {
            let (event, span) = event.map_err(|error| DocumentError {
                position: position(error.marker()),
                what: format!("not YAML: {}", error.info()),
            })?;
            let end = matches!(event, Event::StreamEnd);
            builder.take(event, position(&span.start))?;
            if end {
                break;
            }
        }
        match builder.root {
            Some(root) if !root.is_null() => Ok(Self { root, repeated: builder.repeated }),
            _ => Err(DocumentError { position: start, what: "the file is empty".into() }),
        }
    }
}

impl DocumentBuilder {
    fn take(&mut self, event: Event<'_>, position: SourcePosition) -> Result<(), DocumentError> {
        let refused = |what: &str| Err(DocumentError { position, what: what.to_owned() });
        match event {
            Event::DocumentStart(..) => {
                self.documents += 1;
                if self.documents > 1 {
                    return refused("a second document, expected one");
                }
            }
            Event::Scalar(text, style, anchor, _) => {
                let plain = style == ScalarStyle::Plain;
                let node = YamlNode::new(position, NodeContent::Scalar { text: text.into_owned(), plain });
                self.close(Rc::new(node), anchor)?;
            }
            Event::Alias(anchor) => match self.anchors.get(&anchor).cloned() {
                Some(node) => self.close(node, 0)?,
                None => return refused("an alias inside the value that it refers to"),
            },
            Event::SequenceStart(_, anchor, _) => {
                self.opened(OpenCollection::List { position, anchor, items: Vec::new() }, position)?;
            }
            Event::MappingStart(_, anchor, _) => {
                let (entries, names, merged) = (Vec::new(), HashMap::new(), Vec::new());
                self.opened(
                    OpenCollection::Map { position, anchor, entries, names, merged, key: None },
                    position,
                )?;
            }
            Event::SequenceEnd | Event::MappingEnd => match self.open.pop() {
                Some(OpenCollection::List { position, anchor, items }) => {
                    self.close(Rc::new(YamlNode::new(position, NodeContent::List(items))), anchor)?;
                }
                Some(OpenCollection::Map { position, anchor, mut entries, merged, .. }) => {
                    merge(&mut entries, &merged);
                    self.close(Rc::new(YamlNode::new(position, NodeContent::Map(entries))), anchor)?;
                }
                None => return refused("an end without a beginning"),
            },
            _ => {}
        }
        Ok(())
    }

    fn opened(&mut self, open: OpenCollection, position: SourcePosition) -> Result<(), DocumentError> {
        if self.open.len() >= DEPTH_MAX {
            return Err(DocumentError { position, what: format!("nested deeper than {DEPTH_MAX}") });
        }
        self.open.push(open);
        Ok(())
    }

    /// Adds a complete node to the innermost open collection, or makes it the root.
    fn close(&mut self, node: Rc<YamlNode>, anchor: usize) -> Result<(), DocumentError> {
        if node.size > SIZE_MAX || node.depth > DEPTH_MAX {
            let what = format!("more than {SIZE_MAX} values, or deeper than {DEPTH_MAX}, with its aliases");
            return Err(DocumentError { position: node.position, what });
        }
        if anchor > 0 {
            self.anchors.insert(anchor, Rc::clone(&node));
        }
        match self.open.last_mut() {
            None => self.root = Some(node),
            Some(OpenCollection::List { items, .. }) => items.push(node),
            Some(OpenCollection::Map { entries, names, merged, key, .. }) => match key.take() {
                None => {
                    let NodeContent::Scalar { text, .. } = &node.content else {
                        return Err(DocumentError {
                            position: node.position,
                            what: "a key must be a word".into(),
                        });
                    };
                    *key = Some(MapKey { name: text.clone(), position: node.position });
                }
                Some(key) if key.name == "<<" => match &node.content {
                    NodeContent::List(items) => merged.extend(items.iter().cloned()),
                    _ => merged.push(node),
                },
                Some(key) => match names.get(&key.name) {
                    Some(&first) if self.repeated.len() < PROBLEMS_MAX => {
                        self.repeated.push((key.position, key.name, first));
                    }
                    Some(_) => {}
                    None => {
                        names.insert(key.name.clone(), key.position);
                        entries.push((key, node));
                    }
                },
            },
        }
        Ok(())
    }
}

/// `<<`: adds the entries of other maps whose keys the map does not have. The first map with a key wins.
fn merge(entries: &mut Vec<(MapKey, Rc<YamlNode>)>, merged: &[Rc<YamlNode>]) {
    let mut known: HashSet<String> = entries.iter().map(|(key, _)| key.name.clone()).collect();
    for map in merged {
        let NodeContent::Map(others) = &map.content else { continue };
        for (key, value) in others {
            if known.insert(key.name.clone()) {
                entries.push((key.clone(), Rc::clone(value)));
            }
        }
    }
}

fn position(marker: &Marker) -> SourcePosition {
    SourcePosition { line: marker.line(), column: marker.col() + 1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(text: &str) -> String {
        Document::read(text).expect_err("it must be refused").what
    }

    #[test]
    fn every_key_and_value_has_its_source_position() {
        let document = Document::read("a:\n  - b: 1\n    c: {d: x}\n").expect("it is YAML");
        for (path, line, column) in [
            ("a", 1, 1),
            ("a[0]", 2, 5),
            ("a[0].c", 3, 5),
            ("a[0].c.d", 3, 12),
            ("a[0].c.nothing", 3, 5),
            ("a[7]", 1, 1),
        ] {
            assert_eq!(document.root.position_of(path), SourcePosition { line, column }, "{path}");
        }
    }

    #[test]
    fn a_duplicate_key_is_reported_with_both_positions() {
        let document = Document::read("a: 1\nb: {c: 1, c: 2}\na: 2\n").expect("it is YAML");
        let repeated: Vec<_> =
            document.repeated.iter().map(|(at, name, first)| (at.line, name.as_str(), first.line)).collect();
        assert_eq!(repeated, [(2, "c", 2), (3, "a", 1)]);
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
    fn oversized_deep_or_recursive_documents_are_refused() {
        assert!(refused(&"#".repeat(BYTES_MAX + 1)).contains("bytes"));
        assert!(
            refused(&format!("a: {}1{}", "[".repeat(DEPTH_MAX), "]".repeat(DEPTH_MAX))).contains("deeper")
        );
        assert!(refused("a: &a [*a]").contains("alias"));
        assert!(refused("a: *missing").contains("not YAML"));
        assert!(refused("a: [1").contains("not YAML"));
        assert!(refused("a: 1\n---\nb: 1\n").contains("second document"));
        assert!(refused("").contains("empty"));
        assert!(refused("# only words\n").contains("empty"));
        let chain: String =
            (1..40).fold("a0: &a0 [x]\n".into(), |text, n| format!("{text}a{n}: &a{n} [*a{}]\n", n - 1));
        assert!(refused(&chain).contains("deeper"), "depth counts through aliases");
    }

    #[test]
    fn merged_maps_supply_missing_keys() {
        let document = Document::read("x: &x {a: 1, b: 2}\ny: {<<: *x, b: 3}\n").expect("it is YAML");
        let y = document.root.get("y").expect("it is there");
        let text = |name: &str| match &y.get(name).expect(name).content {
            NodeContent::Scalar { text, .. } => text.clone(),
            other => panic!("{other:?}"),
        };
        assert_eq!((text("a"), text("b")), ("1".into(), "3".into()));
    }
}
