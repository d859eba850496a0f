//! Whether a terminal has input, or is closed.
#![allow(unsafe_code, reason = "poll(2), and openpty(3) in the test; each block says why it is sound")]

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// State of a terminal's input.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TerminalInput {
    Nothing,
    Waits,
    /// The terminal's window was closed, or the connection is lost.
    Gone,
}

/// Waits until a terminal has input, for at most `within`.
///
/// # Errors
/// If the system call fails.
pub(super) fn look(terminal: &impl AsFd, within: Duration) -> io::Result<TerminalInput> {
    let fd = terminal.as_fd().as_raw_fd();
    let mut asked = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: `poll` gets one entry, which outlives the call, and a descriptor that is borrowed during the call.
    let found = unsafe { libc::poll(&raw mut asked, 1, ms) };
    if found < 0 {
        let error = io::Error::last_os_error();
        // Interrupted by a signal, such as a change of the window's size.
        return if error.kind() == io::ErrorKind::Interrupted {
            Ok(TerminalInput::Nothing)
        } else {
            Err(error)
        };
    }
    Ok(match asked.revents {
        0 => TerminalInput::Nothing,
        events if events & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 => TerminalInput::Gone,
        _ => TerminalInput::Waits,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::FromRawFd;

    use super::*;

    /// Both ends of a terminal: the window's and the program's.
    fn terminal() -> (File, File) {
        let (mut window, mut program) = (0, 0);
        let (name, mode, size) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
        // SAFETY: both places are local variables, and the other pointers are null.
        let made = unsafe { libc::openpty(&raw mut window, &raw mut program, name, mode, size) };
        assert_eq!(made, 0, "{}", io::Error::last_os_error());
        // SAFETY: both descriptors were just opened and have no other owner.
        unsafe { (File::from_raw_fd(window), File::from_raw_fd(program)) }
    }

    #[test]
    fn a_closed_terminal_is_distinct_from_a_silent_one() {
        let (mut window, program) = terminal();
        let look = || look(&program, Duration::from_millis(1)).expect("it can be looked at");
        assert_eq!(look(), TerminalInput::Nothing);
        window.write_all(b"q\n").expect("a key");
        assert_eq!(look(), TerminalInput::Waits);
        drop(window);
        assert_eq!(look(), TerminalInput::Gone);
    }
}
