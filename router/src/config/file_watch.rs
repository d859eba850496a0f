//! Whether files have changed, by what the file system says of them: device, inode, size, times. A symlink that
//! is swapped (as Kubernetes does for mounted secrets) leads to another inode; a file written in place has another
//! change time. Polled: that works on every file system, and a second is soon enough for a certificate.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

type Seen = Option<[i128; 7]>;

/// Some files, and how they looked the last time.
#[derive(Debug)]
pub(crate) struct FileWatch {
    paths: Vec<PathBuf>,
    seen: Mutex<Vec<Seen>>,
}

impl FileWatch {
    /// Make it before the files are read: what changes in between is then read twice, and never missed.
    pub(crate) fn new(paths: Vec<PathBuf>) -> Self {
        let seen = look(&paths);
        Self { paths, seen: Mutex::new(seen) }
    }

    /// Whether any of them has changed since this was last asked, or since the beginning.
    pub(crate) fn has_changed(&self) -> bool {
        let now = look(&self.paths);
        let mut seen = self.seen.lock().unwrap_or_else(PoisonError::into_inner);
        let changed = *seen != now;
        *seen = now;
        changed
    }
}

fn look(paths: &[PathBuf]) -> Vec<Seen> {
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
