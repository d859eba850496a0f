//! The terminal: taken, drawn on, and restored, however this program ends.

mod tty;

use std::io::{self, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use baton_router::snapshot::{Snapshot, Timeline};
use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::crossterm::{cursor, event, execute};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;

use super::app::{App, AppAction, Key};
use super::source::Sources;
use super::view::{self, Theme};
use crate::BenchError;

/// How soon the reader of keys notices that it must end.
const READER_LOOKS: Duration = Duration::from_millis(100);
/// Maximum keys in the queue.
const KEYS_MAX: usize = 64;

/// An update for the screen.
enum Update {
    Snapshot(Box<Snapshot>),
    Timeline(String, Box<Result<Timeline, String>>),
}

/// Shows the deployment until the user quits or a signal arrives.
///
/// # Errors
/// If the terminal cannot be used.
pub(super) async fn run(
    sources: Sources,
    every: Duration,
    theme: Theme,
    out: &mut dyn Write,
) -> Result<(), BenchError> {
    let stop = wait_for_stop();
    let mut stop = std::pin::pin!(stop);
    let taken = TerminalGuard::take()?;
    let mut terminal = Terminal::new(CrosstermBackend::new(out))?;
    terminal.clear()?;
    let mut keys = KeyReader::read();
    let (sender, mut updates) = mpsc::channel(4);
    // One query at a time. Keys are processed meanwhile.
    let looking = tokio::spawn(look(sources.clone(), every, sender.clone()));
    let mut app = App::new();
    let result = loop {
        terminal.draw(|frame| view::draw(frame, &app, theme))?;
        let event = tokio::select! {
            stopped = &mut stop => break stopped,
            event = keys.events.recv() => event,
            update = updates.recv() => {
                match update {
                    Some(Update::Snapshot(snapshot)) => app.take(*snapshot),
                    Some(Update::Timeline(id, line)) => app.take_timeline(&id, *line),
                    None => {}
                }
                continue;
            }
        };
        let key = match event {
            Some(Ok(event)) => key_of(&event),
            Some(Err(error)) => break Err(error),
            None => break Ok(()),
        };
        match key.map_or(AppAction::Draw, |key| app.key(key)) {
            AppAction::Draw => {}
            AppAction::Quit => break Ok(()),
            AppAction::FetchTimeline(id) => {
                let (sources, sender) = (sources.clone(), sender.clone());
                tokio::spawn(async move {
                    let line = sources.timeline(&id).await;
                    // The receiver is gone if the screen was closed.
                    let _ = sender.send(Update::Timeline(id, Box::new(line))).await;
                });
            }
        }
    };
    looking.abort();
    drop(terminal);
    drop(taken);
    Ok(result?)
}

async fn look(sources: Sources, every: Duration, sender: mpsc::Sender<Update>) {
    let mut due = tokio::time::interval(every);
    due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        let snapshot = Box::new(sources.snapshot().await);
        if sender.send(Update::Snapshot(snapshot)).await.is_err() {
            return;
        }
    }
}

/// Returns after a signal to stop. In raw mode Ctrl-C is a key.
pub(super) async fn wait_for_stop() -> io::Result<()> {
    let (mut interrupt, mut terminate) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
    let mut hangup = signal(SignalKind::hangup())?;
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
        _ = hangup.recv() => {}
    }
    Ok(())
}

/// Owns the terminal. Dropping restores it, as does a panic before its message is printed.
struct TerminalGuard;

/// Whether the terminal must be restored.
static OURS: AtomicBool = AtomicBool::new(false);

impl TerminalGuard {
    fn take() -> io::Result<Self> {
        static HOOK: std::sync::Once = std::sync::Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                restore_terminal();
                before(panic);
            }));
        });
        enable_raw_mode()?;
        OURS.store(true, Ordering::SeqCst);
        let taken = Self;
        execute!(io::stdout(), EnterAlternateScreen, cursor::Hide)?;
        Ok(taken)
    }
}

impl Drop for TerminalGuard {
    fn drop(&mut self) {
        restore_terminal();
    }
}

fn restore_terminal() {
    if OURS.swap(false, Ordering::SeqCst) {
        // If the terminal is gone, nothing needs to be restored.
        let _ = execute!(io::stdout(), LeaveAlternateScreen, cursor::Show);
        let _ = disable_raw_mode();
    }
}

/// A thread that waits for keys. Dropping ends it.
struct KeyReader {
    events: mpsc::Receiver<io::Result<Event>>,
    over: Arc<AtomicBool>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl KeyReader {
    fn read() -> Self {
        let (sender, events) = mpsc::channel(KEYS_MAX);
        let over = Arc::new(AtomicBool::new(false));
        let reader = {
            let over = Arc::clone(&over);
            std::thread::spawn(move || {
                while !over.load(Ordering::SeqCst) {
                    let event = match next(&io::stdin()) {
                        Ok(None) => continue,
                        Ok(Some(event)) => Ok(event),
                        Err(error) => Err(error),
                    };
                    let broken = event.is_err();
                    if sender.blocking_send(event).is_err() || broken {
                        return;
                    }
                }
            })
        };
        Self { events, over, reader: Some(reader) }
    }
}

/// The next event within [`READER_LOOKS`]. A closed terminal is an error. crossterm does not detect it and would
/// read without end.
fn next(terminal: &io::Stdin) -> io::Result<Option<Event>> {
    let there = |within| match tty::look(terminal, within)? {
        tty::TerminalInput::Gone => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the terminal is gone")),
        tty::TerminalInput::Nothing | tty::TerminalInput::Waits => Ok(()),
    };
    there(Duration::ZERO)?;
    // Only crossterm knows of keys that arrived together and of changes of the window's size.
    if event::poll(Duration::ZERO)? {
        return event::read().map(Some);
    }
    there(READER_LOOKS)?;
    Ok(None)
}

impl Drop for KeyReader {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.events.close();
        if let Some(reader) = self.reader.take() {
            // A panic of the reader was already printed.
            let _ = reader.join();
        }
    }
}

fn key_of(event: &Event) -> Option<Key> {
    let Event::Key(KeyEvent { code, modifiers, kind, .. }) = event else { return None };
    if *kind == KeyEventKind::Release {
        return None;
    }
    let control = modifiers.contains(KeyModifiers::CONTROL);
    Some(match code {
        KeyCode::Char('c' | 'C' | 'd') if control => Key::Interrupt,
        KeyCode::Char(_) if control => return None,
        KeyCode::Char(letter) => Key::Letter(*letter),
        KeyCode::Up => Key::Up,
        KeyCode::Down => Key::Down,
        KeyCode::PageUp => Key::PageUp,
        KeyCode::PageDown => Key::PageDown,
        KeyCode::Home => Key::Home,
        KeyCode::End => Key::End,
        KeyCode::Enter => Key::Enter,
        KeyCode::Esc => Key::Escape,
        KeyCode::Backspace => Key::Backspace,
        KeyCode::Tab | KeyCode::BackTab => Key::Tab,
        _ => return None,
    })
}
