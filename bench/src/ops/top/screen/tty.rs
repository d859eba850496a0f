//! Whether a terminal has something to be read, or is gone.
#![allow(unsafe_code)] // poll(2), and openpty(3) in the test; each block says why it is sound

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

/// What a look at a terminal has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Input {
    Nothing,
    Waits,
    /// Nobody has it any more: its window was closed, or the connection is lost.
    Gone,
}

/// Looks at a terminal until it has something to be read, at most for so long.
///
/// # Errors
/// When the system cannot say.
pub(super) fn look(terminal: &impl AsFd, within: Duration) -> io::Result<Input> {
    let fd = terminal.as_fd().as_raw_fd();
    let mut asked = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let ms = i32::try_from(within.as_millis()).unwrap_or(i32::MAX);
    // SAFETY: one entry, which lives longer than the call, and a descriptor that is borrowed for it.
    let found = unsafe { libc::poll(&raw mut asked, 1, ms) };
    if found < 0 {
        let error = io::Error::last_os_error();
        // A signal: the window's size, for one.
        return if error.kind() == io::ErrorKind::Interrupted { Ok(Input::Nothing) } else { Err(error) };
    }
    Ok(match asked.revents {
        0 => Input::Nothing,
        events if events & (libc::POLLHUP | libc::POLLERR | libc::POLLNVAL) != 0 => Input::Gone,
        _ => Input::Waits,
    })
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::io::Write as _;
    use std::os::fd::FromRawFd;

    use super::*;

    /// Both ends of a terminal: the window's, and the program's.
    fn terminal() -> (File, File) {
        let (mut window, mut program) = (0, 0);
        let (name, mode, size) = (std::ptr::null_mut(), std::ptr::null(), std::ptr::null());
        // SAFETY: both places are ours, and nothing else is asked for.
        let made = unsafe { libc::openpty(&raw mut window, &raw mut program, name, mode, size) };
        assert_eq!(made, 0, "{}", io::Error::last_os_error());
        // SAFETY: both were just opened, and nobody else has them.
        unsafe { (File::from_raw_fd(window), File::from_raw_fd(program)) }
    }

    #[test]
    fn a_terminal_that_is_gone_is_told_from_one_that_is_silent() {
        let (mut window, program) = terminal();
        let look = || look(&program, Duration::from_millis(1)).expect("it can be looked at");
        assert_eq!(look(), Input::Nothing);
        window.write_all(b"q\n").expect("a key");
        assert_eq!(look(), Input::Waits);
        drop(window);
        assert_eq!(look(), Input::Gone);
    }
}
