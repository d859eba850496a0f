//! Files that a configuration names, opened without a wait: a pipe that has no other end would hold the thread for ever.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::Path;

/// Opens a regular file to be read.
///
/// # Errors
/// What the system says, or that it is no regular file.
pub(crate) fn open(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(Error::new(ErrorKind::InvalidInput, "not a regular file"))
}

/// The text of a regular file of at most so many bytes.
///
/// # Errors
/// As [`open`], and where it is larger, or no UTF-8.
pub(crate) fn read_text(path: &Path, most: u64) -> std::io::Result<String> {
    let mut text = String::new();
    open(path)?.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("larger than {most} bytes")));
    }
    Ok(text)
}

/// Opens a file to be appended to, and makes it where it is not there: a regular file, a terminal or another device of
/// characters, or a pipe that is read at its other end.
///
/// # Errors
/// What the system says (no such device or address: nothing reads the pipe), or that it is something else.
pub(crate) fn append(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().create(true).append(true).custom_flags(libc::O_NONBLOCK).open(path);
    let file = file.map_err(|error| match error.raw_os_error() {
        Some(libc::ENXIO) => Error::new(ErrorKind::NotConnected, "a pipe or a socket without a reader"),
        _ => error,
    })?;
    let kind = file.metadata()?.file_type();
    if kind.is_file() || kind.is_fifo() || kind.is_char_device() {
        return Ok(file);
    }
    Err(Error::new(ErrorKind::InvalidInput, "not a regular file, terminal or pipe"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo runs");
        assert!(made.success());
    }

    #[test]
    fn a_pipe_without_another_end_is_refused_at_once_and_one_that_is_read_is_written() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("pipe");
        pipe(&path);
        assert_eq!(open(&path).expect_err("nothing writes").kind(), ErrorKind::InvalidInput);
        assert_eq!(append(&path).expect_err("nothing reads").kind(), ErrorKind::NotConnected);
        let _reader =
            OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(&path).expect("a reader");
        append(&path).expect("it is read");
    }

    #[test]
    fn files_and_devices_of_characters_are_appended_to_and_folders_are_not() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("log");
        append(&path).expect("it is made");
        append(Path::new("/dev/null")).expect("a device");
        append(folder.path()).expect_err("a folder");
        std::fs::write(&path, "12345").expect("written");
        assert_eq!(read_text(&path, 5).expect("as large as it may be"), "12345");
        assert_eq!(read_text(&path, 4).expect_err("larger").kind(), ErrorKind::FileTooLarge);
        assert_eq!(open(Path::new("/dev/zero")).expect_err("a device").kind(), ErrorKind::InvalidInput);
    }
}
