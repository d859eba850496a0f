//! What is on the screen and what a key does to it. Pure: no terminal, no clock, no network.

use baton_router::snapshot::{LeaseView, RequestView, Snapshot, Timeline};

use super::history::History;

/// Letters of a filter.
const FILTER_LETTERS_MAX: usize = 100;

/// What a key means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// A letter; in a filter itself, elsewhere a command.
    Letter(char),
    /// Up, or `k`.
    Up,
    /// Down, or `j`.
    Down,
    /// A page up.
    PageUp,
    /// A page down.
    PageDown,
    /// To the beginning.
    Home,
    /// To the end.
    End,
    /// Shows what is selected.
    Enter,
    /// Back.
    Escape,
    /// Takes the last letter of a filter away.
    Backspace,
    /// The other list.
    Tab,
    /// Ctrl-C.
    Interrupt,
}

/// What the screen's owner must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Act {
    /// Draw again.
    Draw,
    /// End.
    Quit,
    /// Ask for the timeline of this request.
    Ask(String),
}

/// A list that can be walked through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum List {
    #[default]
    Leases,
    Requests,
}

/// One request's timeline, as far as it is there.
#[derive(Debug)]
pub(super) struct Detail {
    pub(super) id: String,
    pub(super) line: Option<Result<Timeline, String>>,
    /// The first moment that is shown.
    pub(super) scroll: usize,
}

/// The state of the screen.
#[derive(Debug, Default)]
pub(super) struct App {
    pub(super) snapshot: Snapshot,
    pub(super) history: History,
    pub(super) list: List,
    /// What is selected, by its name: rows move while they are looked at.
    selected: Option<String>,
    /// Where it was.
    at: usize,
    pub(super) filter: String,
    /// Letters go to the filter.
    pub(super) filtering: bool,
    pub(super) detail: Option<Detail>,
    pub(super) paused: bool,
    /// No snapshot has come yet.
    pub(super) waiting: bool,
    pub(super) help: bool,
}

/// Rows that a page key moves by.
const PAGE: usize = 10;

impl App {
    pub(super) fn new() -> Self {
        Self { waiting: true, ..Self::default() }
    }

    /// A new look at the deployment.
    pub(super) fn take(&mut self, snapshot: Snapshot) {
        self.waiting = false;
        self.history.look(&snapshot);
        if !self.paused {
            self.snapshot = snapshot;
            self.follow();
        }
    }

    /// What was asked for with [`Act::Ask`].
    pub(super) fn told(&mut self, id: &str, line: Result<Timeline, String>) {
        if let Some(detail) = self.detail.as_mut().filter(|detail| detail.id == id) {
            detail.line = Some(line);
        }
    }

    /// The leases that the filter lets through.
    pub(super) fn leases(&self) -> Vec<&LeaseView> {
        let has = |lease: &&LeaseView| {
            self.lets_through(&[&lease.request_id, &lease.engine, &lease.state, &lease.why])
                || (lease.stranded == Some(true) && "stranded".contains(&self.filter.to_lowercase()))
        };
        self.snapshot.leases.iter().filter(has).collect()
    }

    /// The requests that the filter lets through.
    pub(super) fn requests(&self) -> Vec<&RequestView> {
        let has = |request: &&RequestView| {
            let text = |text: &Option<String>| text.clone().unwrap_or_default();
            let (prefill, decode, model) =
                (text(&request.prefill_engine), text(&request.decode_engine), text(&request.model));
            self.lets_through(&[&request.request_id, &request.phase, &prefill, &decode, &model])
        };
        self.snapshot.requests.oldest.iter().filter(has).collect()
    }

    fn lets_through(&self, texts: &[&str]) -> bool {
        let filter = self.filter.to_lowercase();
        filter.is_empty() || texts.iter().any(|text| text.to_lowercase().contains(&filter))
    }

    /// The selected row of the list; 0 in an empty one.
    pub(super) fn selected(&self) -> usize {
        self.at
    }

    fn names(&self) -> Vec<String> {
        match self.list {
            List::Leases => self
                .leases()
                .iter()
                .map(|lease| format!("{}\n{}\n{}", lease.request_id, lease.engine, lease.rank))
                .collect(),
            List::Requests => self.requests().iter().map(|request| request.request_id.clone()).collect(),
        }
    }

    /// Stays on the selected row, wherever it has moved to; on its place when it is gone.
    fn follow(&mut self) {
        let names = self.names();
        let found = self.selected.as_ref().and_then(|name| names.iter().position(|other| other == name));
        self.at = found.unwrap_or(self.at).min(names.len().saturating_sub(1));
        self.selected = names.get(self.at).cloned();
    }

    fn select(&mut self, at: usize) {
        let names = self.names();
        self.at = at.min(names.len().saturating_sub(1));
        self.selected = names.get(self.at).cloned();
    }

    /// Takes a key.
    pub(super) fn key(&mut self, key: Key) -> Act {
        if key == Key::Interrupt {
            return Act::Quit;
        }
        if self.filtering {
            self.filter_key(key);
            return Act::Draw;
        }
        if self.help {
            self.help = false;
            return if key == Key::Letter('q') { Act::Quit } else { Act::Draw };
        }
        if self.detail.is_some() {
            return self.detail_key(key);
        }
        match key {
            Key::Letter('q') => return Act::Quit,
            Key::Letter('/') => self.filtering = true,
            Key::Letter('?' | 'h') => self.help = true,
            Key::Letter('p' | ' ') => self.paused = !self.paused,
            Key::Up | Key::Letter('k') => self.select(self.at.saturating_sub(1)),
            Key::Down | Key::Letter('j') => self.select(self.at + 1),
            Key::PageUp => self.select(self.at.saturating_sub(PAGE)),
            Key::PageDown => self.select(self.at + PAGE),
            Key::Home | Key::Letter('g') => self.select(0),
            Key::End | Key::Letter('G') => self.select(usize::MAX),
            Key::Tab => {
                self.list = if self.list == List::Leases { List::Requests } else { List::Leases };
                (self.at, self.selected) = (0, None);
                self.follow();
            }
            Key::Escape => {
                self.filter.clear();
                self.follow();
            }
            Key::Enter | Key::Letter('x') => {
                let Some(name) = &self.selected else { return Act::Draw };
                let id = name.split('\n').next().unwrap_or_default().to_owned();
                self.detail = Some(Detail { id: id.clone(), line: None, scroll: 0 });
                return Act::Ask(id);
            }
            Key::Letter(_) | Key::Backspace | Key::Interrupt => {}
        }
        Act::Draw
    }

    fn filter_key(&mut self, key: Key) {
        match key {
            Key::Letter(letter) if self.filter.chars().count() < FILTER_LETTERS_MAX => {
                self.filter.push(letter);
            }
            Key::Backspace => drop(self.filter.pop()),
            Key::Enter => self.filtering = false,
            Key::Escape => {
                self.filter.clear();
                self.filtering = false;
            }
            _ => {}
        }
        self.follow();
    }

    fn detail_key(&mut self, key: Key) -> Act {
        let Some(detail) = &mut self.detail else { return Act::Draw };
        let last = match &detail.line {
            Some(Ok(line)) => (line.moments.len() + line.notes.len()).saturating_sub(1),
            _ => 0,
        };
        let scroll = detail.scroll;
        detail.scroll = match key {
            Key::Letter('r') => return Act::Ask(detail.id.clone()),
            Key::Letter('q') | Key::Escape | Key::Enter | Key::Letter('x') => {
                self.detail = None;
                return Act::Draw;
            }
            Key::Up | Key::Letter('k') => scroll.saturating_sub(1),
            Key::Down | Key::Letter('j') => scroll + 1,
            Key::PageUp => scroll.saturating_sub(PAGE),
            Key::PageDown | Key::Letter(' ') => scroll + PAGE,
            Key::Home | Key::Letter('g') => 0,
            Key::End | Key::Letter('G') => last,
            _ => scroll,
        }
        .min(last);
        Act::Draw
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn app(ids: &[&str]) -> App {
        let mut app = App::new();
        app.take(looks(ids));
        app
    }

    fn looks(ids: &[&str]) -> Snapshot {
        let lease = |id: &&str| LeaseView { request_id: (*id).to_owned(), ..LeaseView::default() };
        Snapshot { leases: ids.iter().map(lease).collect(), ..Snapshot::default() }
    }

    #[test]
    fn the_selection_stays_with_its_row_and_then_with_its_place() {
        let mut app = app(&["a", "b", "c"]);
        app.key(Key::Letter('j'));
        assert_eq!(app.key(Key::Enter), Act::Ask("b".to_owned()));
        app.key(Key::Escape);
        app.take(looks(&["x", "y", "b"]));
        assert_eq!(app.selected(), 2, "it has moved");
        app.take(looks(&["x", "y"]));
        assert_eq!(app.key(Key::Enter), Act::Ask("y".to_owned()), "it is gone");
        app.key(Key::Escape);
        app.take(looks(&[]));
        assert_eq!((app.selected(), app.key(Key::Enter)), (0, Act::Draw));
        app.key(Key::End);
        app.key(Key::Down);
        assert_eq!(app.selected(), 0);
    }

    #[test]
    fn a_filter_takes_letters_until_it_is_done() {
        let mut app = app(&["apple", "quince"]);
        for key in [Key::Letter('/'), Key::Letter('q'), Key::Letter('U')] {
            assert_eq!(app.key(key), Act::Draw);
        }
        assert_eq!(app.leases().len(), 1, "q is a letter here, and case does not matter");
        app.key(Key::Enter);
        assert_eq!(app.key(Key::Enter), Act::Ask("quince".to_owned()));
        app.key(Key::Letter('q'));
        app.key(Key::Escape);
        assert_eq!(app.leases().len(), 2);
        app.key(Key::Letter('/'));
        (0..200).for_each(|_| drop(app.key(Key::Letter('z'))));
        assert_eq!(app.filter.len(), FILTER_LETTERS_MAX);
        assert_eq!(app.key(Key::Interrupt), Act::Quit, "from everywhere");
    }

    #[test]
    fn a_pause_keeps_what_is_shown_and_a_late_timeline_of_another_request_is_dropped() {
        let mut app = app(&["a"]);
        app.key(Key::Letter('p'));
        app.take(looks(&["b"]));
        assert_eq!(app.key(Key::Enter), Act::Ask("a".to_owned()));
        app.told("b", Err("no".to_owned()));
        assert!(app.detail.as_ref().is_some_and(|detail| detail.line.is_none()));
        app.told("a", Ok(Timeline::default()));
        assert!(app.detail.as_ref().is_some_and(|detail| detail.line.is_some()));
        app.key(Key::End);
        assert_eq!(app.key(Key::Letter('q')), Act::Draw, "back, not out");
        assert_eq!(app.key(Key::Letter('q')), Act::Quit);
    }
}
