//! The router's configuration in a file without a name, which the router inherits open.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;

use rustix::io::{FdFlags, fcntl_setfd};

/// Open until the router has read it; every read of its path begins at the beginning.
pub(super) struct ConfigFile(File);

impl ConfigFile {
    /// # Errors
    /// When the temporary directory takes no file.
    pub(super) fn new(text: &str) -> io::Result<Self> {
        let mut file = tempfile::tempfile()?;
        file.write_all(text.as_bytes())?;
        file.rewind()?;
        // The child opens it by its number.
        fcntl_setfd(&file, FdFlags::empty())?;
        Ok(Self(file))
    }

    /// Where a child finds it.
    pub(super) fn path(&self) -> String {
        format!("/dev/fd/{}", self.0.as_raw_fd())
    }
}
