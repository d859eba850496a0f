//! The generation in effect, and the inputs of the next one.

use std::sync::Mutex;

use arc_swap::ArcSwap;
use tokio::sync::Notify;

use crate::engines::discovery_sources::DiscoverySources;
use crate::state::generation::Generation;
use crate::state::reloads::ReloadStatus;

/// The generation in effect, and the inputs of the next one.
pub(crate) struct Installer {
    pub(super) current: ArcSwap<Generation>,
    /// Locked while files are read for the next generation: one reload at a time.
    pub(super) reloading: Mutex<()>,
    /// Locked while the next generation is built, so that no update is lost. No input or output happens under this
    /// lock.
    pub(super) installing: Mutex<()>,
    /// The engines found by discovery.
    pub sources: DiscoverySources,
    /// The results of reloads.
    pub reloads: ReloadStatus,
    /// Requests a reload of all files.
    pub file_reload: Notify,
    pub(super) runtime: tokio::runtime::Handle,
}

impl Installer {
    pub(super) fn new(
        first: Generation,
        sources: DiscoverySources,
        reloads: ReloadStatus,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        Self {
            current: ArcSwap::from_pointee(first),
            reloading: Mutex::default(),
            installing: Mutex::default(),
            sources,
            reloads,
            file_reload: Notify::new(),
            runtime,
        }
    }
}
