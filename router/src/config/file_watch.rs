//! Detects changed files by their metadata: device, inode, size and times. A swapped symlink, as Kubernetes swaps them
//! for mounted secrets, leads to another inode. A file written in place has another change time.
//!
//! Callers poll: polling works on every file system, and a delay of one second is acceptable for a certificate.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

type FileState = Option<[i128; 7]>;

/// Files and their metadata at the last check.
#[derive(Debug)]
pub(crate) struct FileWatch {
    paths: Vec<PathBuf>,
    states: Mutex<Vec<FileState>>,
}

impl FileWatch {
    /// Create the watch before the files are read. A change in between then causes a second read and is not missed.
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        let states = read_states(&paths);
        Self { paths, states: Mutex::new(states) }
    }

    /// Whether a file has changed since the last call, or since the watch was created.
    pub(crate) fn has_changed(&self) -> bool {
        let now = read_states(&self.paths);
        let mut states = self.states.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *states != now;
        *states = now;
        changed
    }
}

fn read_states(paths: &[PathBuf]) -> Vec<FileState> {
    let one = |path: &Path| {
        let of = std::fs::metadata(path).ok()?;
        Some([
            of.dev().into(),
            of.ino().into(),
            of.size().into(),
            of.mtime().into(),
            of.mtime_nsec().into(),
            of.ctime().into(),
            of.ctime_nsec().into(),
        ])
    };
    paths.iter().map(|path| one(path)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_written_replaced_swapped_or_removed_has_changed_once() {
        let dir = tempfile::tempdir().unwrap();
        let (a, b, link) = (dir.path().join("a"), dir.path().join("b"), dir.path().join("link"));
        std::fs::write(&a, "1").unwrap();
        std::fs::write(&b, "2").unwrap();
        std::os::unix::fs::symlink(&a, &link).unwrap();
        let watch = FileWatch::new(vec![link.clone()]);
        assert!(!watch.has_changed());
        let changes: [(&str, &dyn Fn()); 4] = [
            ("in place", &|| std::fs::write(&a, "one").unwrap()),
            ("swapped", &|| {
                std::os::unix::fs::symlink(&b, dir.path().join("new")).unwrap();
                std::fs::rename(dir.path().join("new"), &link).unwrap();
            }),
            ("removed", &|| std::fs::remove_file(&b).unwrap()),
            ("back", &|| std::fs::write(&b, "2").unwrap()),
        ];
        for (what, change) in changes {
            change();
            assert!(watch.has_changed(), "{what}");
            assert!(!watch.has_changed(), "{what}: once");
        }
    }
}
