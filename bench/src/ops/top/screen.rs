//! The terminal: taken over, drawn on, and given back as it was, whatever ends this program.

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

use super::app::{Act, App, Key};
use super::source::Sources;
use super::view::{self, Theme};
use crate::BenchError;

/// How soon the reader of keys notices that nobody wants them any more.
const READER_LOOKS: Duration = Duration::from_millis(100);
/// Keys that wait to be taken.
const KEYS_MAX: usize = 64;

/// Something that was asked for has come.
enum Told {
    Snapshot(Box<Snapshot>),
    Timeline(String, Box<Result<Timeline, String>>),
}

/// Shows the deployment until somebody quits.
///
/// # Errors
/// When the terminal cannot be used.
pub(super) async fn run(
    sources: Sources,
    every: Duration,
    theme: Theme,
    out: &mut dyn Write,
) -> Result<(), BenchError> {
    let stop = told_to_stop();
    let mut stop = std::pin::pin!(stop);
    let taken = Taken::take()?;
    let mut terminal = Terminal::new(CrosstermBackend::new(out))?;
    terminal.clear()?;
    let mut keys = Keys::read();
    let (tell, mut told) = mpsc::channel(4);
    // One look at a time, however long it takes: the screen answers meanwhile.
    let looking = tokio::spawn(look(sources.clone(), every, tell.clone()));
    let mut app = App::new();
    let result = loop {
        terminal.draw(|frame| view::draw(frame, &app, theme))?;
        let event = tokio::select! {
            stopped = &mut stop => break stopped,
            event = keys.events.recv() => event,
            told = told.recv() => {
                match told {
                    Some(Told::Snapshot(snapshot)) => app.take(*snapshot),
                    Some(Told::Timeline(id, line)) => app.told(&id, *line),
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
        match key.map_or(Act::Draw, |key| app.key(key)) {
            Act::Draw => {}
            Act::Quit => break Ok(()),
            Act::Ask(id) => {
                let (sources, tell) = (sources.clone(), tell.clone());
                tokio::spawn(async move {
                    let line = sources.timeline(&id).await;
                    // Nobody is there any more when the screen is closed.
                    let _ = tell.send(Told::Timeline(id, Box::new(line))).await;
                });
            }
        }
    };
    looking.abort();
    drop(terminal);
    drop(taken);
    Ok(result?)
}

async fn look(sources: Sources, every: Duration, tell: mpsc::Sender<Told>) {
    let mut due = tokio::time::interval(every);
    due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        due.tick().await;
        let snapshot = Box::new(sources.snapshot().await);
        if tell.send(Told::Snapshot(snapshot)).await.is_err() {
            return;
        }
    }
}

/// Ends when somebody tells this process to stop. In raw mode Ctrl-C is a key.
pub(super) async fn told_to_stop() -> io::Result<()> {
    let mut signals = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()].map(signal);
    let [interrupt, terminate, hangup] = &mut signals;
    let gone = |signal: &mut io::Result<_>| -> io::Result<()> {
        signal.as_mut().map(|_| ()).map_err(|error| io::Error::new(error.kind(), error.to_string()))
    };
    for signal in [&mut *interrupt, &mut *terminate, &mut *hangup] {
        gone(signal)?;
    }
    if let (Ok(interrupt), Ok(terminate), Ok(hangup)) = (interrupt, terminate, hangup) {
        tokio::select! {
            _ = interrupt.recv() => {}
            _ = terminate.recv() => {}
            _ = hangup.recv() => {}
        }
    }
    Ok(())
}

/// The terminal is ours; it is given back when this is dropped, and by a panic before its message is printed.
struct Taken;

/// Whether there is anything to give back.
static OURS: AtomicBool = AtomicBool::new(false);

impl Taken {
    fn take() -> io::Result<Self> {
        static HOOK: std::sync::Once = std::sync::Once::new();
        HOOK.call_once(|| {
            let before = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |panic| {
                give_back();
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

impl Drop for Taken {
    fn drop(&mut self) {
        give_back();
    }
}

fn give_back() {
    if OURS.swap(false, Ordering::SeqCst) {
        // If the terminal is gone there is nothing to be put right.
        let _ = execute!(io::stdout(), LeaveAlternateScreen, cursor::Show);
        let _ = disable_raw_mode();
    }
}

/// A thread that waits for keys; it ends when this is dropped.
struct Keys {
    events: mpsc::Receiver<io::Result<Event>>,
    over: Arc<AtomicBool>,
    reader: Option<std::thread::JoinHandle<()>>,
}

impl Keys {
    fn read() -> Self {
        let (tell, events) = mpsc::channel(KEYS_MAX);
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
                    if tell.blocking_send(event).is_err() || broken {
                        return;
                    }
                }
            })
        };
        Self { events, over, reader: Some(reader) }
    }
}

/// What the terminal says within [`READER_LOOKS`]. A terminal that is gone is an error, which crossterm does not see: it would
/// read nothing from it, again and again, and never come back.
fn next(terminal: &io::Stdin) -> io::Result<Option<Event>> {
    let there = |within| match tty::look(terminal, within)? {
        tty::Input::Gone => Err(io::Error::new(io::ErrorKind::UnexpectedEof, "the terminal is gone")),
        tty::Input::Nothing | tty::Input::Waits => Ok(()),
    };
    there(Duration::ZERO)?;
    // Keys that came together, and windows of another size, only crossterm knows of.
    if event::poll(Duration::ZERO)? {
        return event::read().map(Some);
    }
    there(READER_LOOKS)?;
    Ok(None)
}

impl Drop for Keys {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
        self.events.close();
        if let Some(reader) = self.reader.take() {
            // A reader that panicked has said so.
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
