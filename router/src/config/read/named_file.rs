//! Files that a configuration names. The functions open them without blocking: a pipe without a peer would block the
//! thread forever.

use std::fs::{File, OpenOptions};
use std::io::{Error, ErrorKind, Read};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Opens a regular file for reading.
///
/// # Errors
/// The system's error, or `InvalidInput` if the file is not regular.
pub(crate) fn open(path: &Path) -> std::io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NONBLOCK).open(path)?;
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(Error::new(ErrorKind::InvalidInput, "not a regular file"))
}

/// The text of a regular file of at most `most` bytes.
///
/// # Errors
/// As [`open`], and if the file is larger or not UTF-8.
pub(crate) fn read_text(path: &Path, most: u64) -> std::io::Result<String> {
    let mut text = String::new();
    open(path)?.take(most + 1).read_to_string(&mut text)?;
    if text.len() as u64 > most {
        return Err(Error::new(ErrorKind::FileTooLarge, format!("larger than {most} bytes")));
    }
    Ok(text)
}

/// Opens a file for appending, and creates it if it does not exist. The file may be regular, a terminal or another
/// character device, or a pipe with a reader.
///
/// # Errors
/// The system's error, `NotConnected` for a pipe without a reader, or `InvalidInput` for other kinds of files.
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

/// A file that a key of the configuration names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NamedFile {
    /// The path of the key: `admin.token_file`, `models[0].decode.engines[1].api_key_file`.
    pub key: String,
    /// The file.
    pub file: PathBuf,
    /// Whether the component that uses the file reloads it by itself.
    pub(in crate::config) followed: bool,
}

/// The section of the configuration that contains a key.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(in crate::config) enum Section {
    /// Its keys `certificate`, `key`, `ca` and `client_ca` name files.
    Tls,
    Other,
}

/// Finds the files that keys below `value` name.
pub(in crate::config) fn find(
    value: &serde_json::Value,
    key_path: &str,
    section: Section,
    files: &mut Vec<NamedFile>,
) {
    // Operators choose the keys of these maps.
    const FREE: [&str; 6] = ["labels", "select", "prefer", "selector", "resource", "objectives"];
    const TLS: [&str; 4] = ["certificate", "key", "ca", "client_ca"];
    const FOLLOWED: [&str; 2] = ["keys_file", "token_file"];
    match value {
        serde_json::Value::Object(entries) => {
            for (key, value) in entries.iter().filter(|(key, _)| !FREE.contains(&key.as_str())) {
                let of_tls = section == Section::Tls && TLS.contains(&key.as_str());
                let key_path = if key_path.is_empty() { key.clone() } else { format!("{key_path}.{key}") };
                match value.as_str().filter(|_| of_tls || key.ends_with("_file")) {
                    Some(path) => {
                        let followed = of_tls || FOLLOWED.contains(&key.as_str());
                        files.push(NamedFile { key: key_path, file: PathBuf::from(path), followed });
                    }
                    None => {
                        let section = if key.ends_with("tls") { Section::Tls } else { Section::Other };
                        find(value, &key_path, section, files);
                    }
                }
            }
        }
        serde_json::Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                find(item, &format!("{key_path}[{index}]"), Section::Other, files);
            }
        }
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pipe(path: &Path) {
        let made = std::process::Command::new("mkfifo").arg(path).status().expect("mkfifo runs");
        assert!(made.success());
    }

    #[test]
    fn a_pipe_without_a_reader_is_refused_and_one_with_a_reader_is_written() {
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
