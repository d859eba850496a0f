//! The state of the screen and the effect of keys. Pure: no terminal, no clock, no network.

use baton_router::snapshot::{LeaseView, RequestView, Snapshot, Timeline};

use super::history::History;

/// Maximum letters of a filter.
const FILTER_LETTERS_MAX: usize = 100;

/// A key by its meaning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key {
    /// A letter of a filter, or a command.
    Letter(char),
    /// Up, or `k`.
    Up,
    /// Down, or `j`.
    Down,
    /// A page up.
    PageUp,
    /// A page down.
    PageDown,
    /// To the first row.
    Home,
    /// To the last row.
    End,
    /// Shows the selected request.
    Enter,
    /// Back.
    Escape,
    /// Deletes the last letter of a filter.
    Backspace,
    /// Switches to the other list.
    Tab,
    /// Ctrl-C.
    Interrupt,
}

/// What the event loop must do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum AppAction {
    /// Draw again.
    Draw,
    /// Quit.
    Quit,
    /// Fetch the timeline of this request.
    FetchTimeline(String),
}

/// A list with a selection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum List {
    #[default]
    Leases,
    Requests,
}

/// One request's timeline, if it was fetched.
#[derive(Debug)]
pub(super) struct TimelineDetail {
    pub(super) id: String,
    pub(super) line: Option<Result<Timeline, String>>,
    /// The first entry that is shown.
    pub(super) scroll: usize,
}

/// The state of the screen.
#[derive(Debug, Default)]
pub(super) struct App {
    pub(super) snapshot: Snapshot,
    pub(super) history: History,
    pub(super) list: List,
    /// The selected row by name, because rows move.
    selected: Option<String>,
    /// The last position of the selected row.
    at: usize,
    pub(super) filter: String,
    /// Letters extend the filter.
    pub(super) filtering: bool,
    pub(super) detail: Option<TimelineDetail>,
    pub(super) paused: bool,
    /// No snapshot was received yet.
    pub(super) waiting: bool,
    pub(super) help: bool,
}

/// Rows that a page key moves by.
const PAGE: usize = 10;

impl App {
    pub(super) fn new() -> Self {
        Self { waiting: true, ..Self::default() }
    }

    /// Takes a new snapshot.
    pub(super) fn take(&mut self, snapshot: Snapshot) {
        self.waiting = false;
        self.history.look(&snapshot);
        if !self.paused {
            self.snapshot = snapshot;
            self.follow();
        }
    }

    /// Takes the result of [`AppAction::FetchTimeline`].
    pub(super) fn take_timeline(&mut self, id: &str, line: Result<Timeline, String>) {
        if let Some(detail) = self.detail.as_mut().filter(|detail| detail.id == id) {
            detail.line = Some(line);
        }
    }

    /// The leases that match the filter.
    pub(super) fn leases(&self) -> Vec<&LeaseView> {
        let has = |lease: &&LeaseView| {
            self.lets_through(&[&lease.request_id, &lease.engine, &lease.state, &lease.why])
                || (lease.stranded == Some(true) && "stranded".contains(&self.filter.to_lowercase()))
        };
        self.snapshot.leases.iter().filter(has).collect()
    }

    /// The requests that match the filter.
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

    /// The selected row of the list. 0 if the list is empty.
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

    /// Keeps the selection on its row if the row moves, and on its position if the row is gone.
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

    /// Processes a key.
    pub(super) fn key(&mut self, key: Key) -> AppAction {
        if key == Key::Interrupt {
            return AppAction::Quit;
        }
        if self.filtering {
            self.filter_key(key);
            return AppAction::Draw;
        }
        if self.help {
            self.help = false;
            return if key == Key::Letter('q') { AppAction::Quit } else { AppAction::Draw };
        }
        if self.detail.is_some() {
            return self.detail_key(key);
        }
        match key {
            Key::Letter('q') => return AppAction::Quit,
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
                let Some(name) = &self.selected else { return AppAction::Draw };
                let id = name.split('\n').next().unwrap_or_default().to_owned();
                self.detail = Some(TimelineDetail { id: id.clone(), line: None, scroll: 0 });
                return AppAction::FetchTimeline(id);
            }
            Key::Letter(_) | Key::Backspace | Key::Interrupt => {}
        }
        AppAction::Draw
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

    fn detail_key(&mut self, key: Key) -> AppAction {
        let Some(detail) = &mut self.detail else { return AppAction::Draw };
        let last = match &detail.line {
            Some(Ok(line)) => (line.moments.len() + line.notes.len()).saturating_sub(1),
            _ => 0,
        };
        let scroll = detail.scroll;
        detail.scroll = match key {
            Key::Letter('r') => return AppAction::FetchTimeline(detail.id.clone()),
            Key::Letter('q') | Key::Escape | Key::Enter | Key::Letter('x') => {
                self.detail = None;
                return AppAction::Draw;
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
        AppAction::Draw
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
    fn the_selection_follows_its_row_and_then_its_index() {
        let mut app = app(&["a", "b", "c"]);
        app.key(Key::Letter('j'));
        assert_eq!(app.key(Key::Enter), AppAction::FetchTimeline("b".to_owned()));
        app.key(Key::Escape);
        app.take(looks(&["x", "y", "b"]));
        assert_eq!(app.selected(), 2, "it has moved");
        app.take(looks(&["x", "y"]));
        assert_eq!(app.key(Key::Enter), AppAction::FetchTimeline("y".to_owned()), "it is gone");
        app.key(Key::Escape);
        app.take(looks(&[]));
        assert_eq!((app.selected(), app.key(Key::Enter)), (0, AppAction::Draw));
        app.key(Key::End);
        app.key(Key::Down);
        assert_eq!(app.selected(), 0);
    }

    #[test]
    fn a_filter_takes_letters_until_it_is_done() {
        let mut app = app(&["apple", "quince"]);
        for key in [Key::Letter('/'), Key::Letter('q'), Key::Letter('U')] {
            assert_eq!(app.key(key), AppAction::Draw);
        }
        assert_eq!(app.leases().len(), 1, "q is a letter here, and case does not matter");
        app.key(Key::Enter);
        assert_eq!(app.key(Key::Enter), AppAction::FetchTimeline("quince".to_owned()));
        app.key(Key::Letter('q'));
        app.key(Key::Escape);
        assert_eq!(app.leases().len(), 2);
        app.key(Key::Letter('/'));
        (0..200).for_each(|_| drop(app.key(Key::Letter('z'))));
        assert_eq!(app.filter.len(), FILTER_LETTERS_MAX);
        assert_eq!(app.key(Key::Interrupt), AppAction::Quit, "from everywhere");
    }

    #[test]
    fn a_pause_freezes_the_screen_and_a_stale_timeline_is_dropped() {
        let mut app = app(&["a"]);
        app.key(Key::Letter('p'));
        app.take(looks(&["b"]));
        assert_eq!(app.key(Key::Enter), AppAction::FetchTimeline("a".to_owned()));
        app.take_timeline("b", Err("no".to_owned()));
        assert!(app.detail.as_ref().is_some_and(|detail| detail.line.is_none()));
        app.take_timeline("a", Ok(Timeline::default()));
        assert!(app.detail.as_ref().is_some_and(|detail| detail.line.is_some()));
        app.key(Key::End);
        assert_eq!(app.key(Key::Letter('q')), AppAction::Draw, "back, not out");
        assert_eq!(app.key(Key::Letter('q')), AppAction::Quit);
    }
}
