//! The router's configuration in a file without a name, which the router inherits as an open file.

use std::fs::File;
use std::io::{self, Seek, Write};
use std::os::fd::AsRawFd;

use rustix::io::{FdFlags, fcntl_setfd};

/// Open until the router has read it. Every read of its path begins at the start of the file.
pub(super) struct ConfigFile(File);

impl ConfigFile {
    /// # Errors
    /// When a file cannot be created in the temporary directory.
    pub(super) fn new(text: &str) -> io::Result<Self> {
        let mut file = tempfile::tempfile()?;
        file.write_all(text.as_bytes())?;
        file.rewind()?;
        // The child opens the file by its descriptor number.
        fcntl_setfd(&file, FdFlags::empty())?;
        Ok(Self(file))
    }

    /// The file's path in a child.
    pub(super) fn path(&self) -> String {
        format!("/dev/fd/{}", self.0.as_raw_fd())
    }
}
