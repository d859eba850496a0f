//! Reload of the configuration when its file changes, while the router runs.
//!
//! ```text
//! every poll_ms ─▶ read the file and its secrets     ─▶ changed? ─ no ─▶ nothing
//! SIGHUP ────────▶            (content, not times)          │ yes
//!                                                           ▼
//!                                     read until two reads are equal (a writer may be active)
//!                                                           ▼
//!                                check ─ invalid ─▶ rejected: logged, counted, the old one stays
//!                                 │ valid
//!                                 ▼
//!                           next generation ─▶ accepted: logged, counted
//! ```
//!
//! Contents are compared, so any kind of replacement works: an editor's rename, a ConfigMap's switch of symbolic
//! links, a network file system without notifications. A rejected configuration is tried again when it changes
//! again.
//!
//! API keys, the admin token and certificates are not part of that content. Their users reload them (`server.rs`),
//! at the same times.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use xxhash_rust::xxh3::Xxh3;

use crate::config::read::{self, named_file};
use crate::config::{ConfigError, RouterConfig};
use crate::state::generation::GenerationError;
use crate::state::shared::Shared;

/// Pause between two reads that must be equal.
const SETTLE: Duration = Duration::from_millis(20);
/// Maximum reads of a file that keeps changing, before it is used as it is.
const READS_MAX: usize = 50;
/// Maximum bytes hashed of a file that the configuration names. Certificates and keys are far smaller.
const NAMED_BYTES_MAX: u64 = 4 << 20;
/// Without polling: interval of checks whether polling was enabled.
const IDLE: Duration = Duration::from_secs(3600);

/// A handle of a running router that replaces its configuration.
#[derive(Clone)]
pub struct ReloadHandle(pub(crate) Arc<Shared>);

impl ReloadHandle {
    /// Puts a configuration into effect for all requests that begin from now on, as a whole or not at all.
    /// Requests in flight finish with the configuration that they began with. Returns the new generation's number.
    ///
    /// The listeners do not change: `listen` and `admin.listen` take effect at a restart. The call reads the files
    /// that the configuration names, so it must not run on a thread that serves requests.
    ///
    /// # Errors
    /// [`GenerationError`] names the problem. The configuration in effect stays.
    pub fn install(&self, config: RouterConfig) -> Result<u64, GenerationError> {
        let before = self.0.generation();
        let (changes, restart) = (before.config.changes(&config), self.0.installer.reloads.restart(&config));
        match self.0.install(config) {
            Ok(number) => {
                for key in &restart {
                    tracing::warn!(
                        event = "restart_required",
                        key,
                        "changed key takes effect at the next start"
                    );
                }
                tracing::info!(
                    event = "configuration_accepted",
                    generation = number,
                    changes = changes.len(),
                    "configuration accepted"
                );
                for change in changes.iter().take(64) {
                    tracing::debug!(event = "configuration_changed", change, "configuration changed");
                }
                self.0.metrics.config.count_accepted();
                self.0.installer.reloads.record(None, restart);
                Ok(number)
            }
            Err(error) => {
                self.reject(&error.to_string());
                Err(error)
            }
        }
    }

    /// Applies changes of the file until it is dropped. It reads the file every `reload.poll_ms`, and on each
    /// message in `requests`, which also puts an unchanged configuration into effect again.
    pub async fn follow(&self, file: ConfigFile, mut requests: mpsc::Receiver<()>) {
        let ConfigFile { path, mut watched, last: mut known } = file;
        let name = path.display().to_string();
        loop {
            let poll = self.0.generation().config.reload.poll_ms;
            let pause = if poll == 0 { IDLE } else { Duration::from_millis(poll) };
            let was_requested = tokio::select! {
                Some(()) = requests.recv() => true,
                () = tokio::time::sleep(pause) => false,
            };
            if !was_requested && poll == 0 {
                continue;
            }
            let mut now = ConfigContent::read(&path, &watched).await;
            if now == known && !was_requested {
                continue;
            }
            for _ in 0..READS_MAX {
                tokio::time::sleep(SETTLE).await;
                let again = ConfigContent::read(&path, &watched).await;
                if again == now {
                    break;
                }
                now = again;
            }
            let read = now.text.clone().and_then(|text| {
                RouterConfig::from_yaml(&text, &name).map_err(|problems| problems.to_string())
            });
            match read {
                Ok(config) => {
                    // Hashed before the files are used, so that the next poll sees a change in between. A
                    // configuration that was rejected for a file is tried again when that file changes.
                    let accepted = config.watched_files();
                    let rejected = &self.0.generation().config.watched_files() | &config.files();
                    let hash_accepted = ConfigContent::read(&path, &accepted).await.named;
                    let hash_rejected = ConfigContent::read(&path, &rejected).await.named;
                    // `install` logs and counts the problems.
                    (watched, now.named) = match self.install_blocking(config).await {
                        true => (accepted, hash_accepted),
                        false => (rejected, hash_rejected),
                    };
                }
                Err(error) => self.reject(&error),
            }
            known = now;
            if was_requested {
                // Also reloads the files that are not part of the configuration.
                self.0.installer.file_reload.notify_one();
            }
        }
    }

    /// [`Self::install`] on a thread that may block.
    async fn install_blocking(&self, config: RouterConfig) -> bool {
        let reload = self.clone();
        let installed = tokio::task::spawn_blocking(move || reload.install(config).is_ok()).await;
        installed.unwrap_or(false)
    }

    fn reject(&self, error: &str) {
        for error in error.lines() {
            tracing::error!(
                event = "configuration_rejected",
                error,
                "configuration rejected, the old one stays in effect"
            );
        }
        self.0.metrics.config.count_rejected();
        self.0.installer.reloads.record(Some(error.to_owned()), Vec::new());
    }
}

/// A configuration's file, with the content from which the configuration in effect was read.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    /// Files that it names and that have no other reload.
    watched: BTreeSet<PathBuf>,
    last: ConfigContent,
}

impl ConfigFile {
    /// Reads the file and stores its content, so that no later change is missed.
    ///
    /// # Errors
    /// [`ConfigError`] with all problems and their positions.
    pub fn load(path: &Path) -> Result<(Self, RouterConfig), ConfigError> {
        let text = read::text_of(path)?;
        let config = RouterConfig::from_yaml(&text, &path.display().to_string())?;
        let watched = config.watched_files();
        // Hashed before the files are used.
        let known = ConfigContent { text: Ok(text), named: hash(&watched) };
        Ok((Self { path: path.to_owned(), watched, last: known }, config))
    }
}

/// The content at one time.
#[derive(Debug, PartialEq, Eq)]
struct ConfigContent {
    text: Result<String, String>,
    /// A hash of the files that the configuration names.
    named: u128,
}

impl ConfigContent {
    async fn read(path: &Path, named: &BTreeSet<PathBuf>) -> Self {
        let (path, named) = (path.to_owned(), named.clone());
        let read = tokio::task::spawn_blocking(move || {
            let text = read::text_of(&path).map_err(|error| error.to_string());
            Self { text, named: hash(&named) }
        });
        read.await.unwrap_or_else(|error| Self { text: Err(error.to_string()), named: 0 })
    }
}

/// A hash of the contents of some files, and of whether each is readable.
fn hash(files: &BTreeSet<PathBuf>) -> u128 {
    let mut hash = Xxh3::new();
    for file in files {
        let mut content = Vec::new();
        let open = named_file::open(file);
        let read = open.and_then(|open| open.take(NAMED_BYTES_MAX).read_to_end(&mut content));
        hash.update(file.as_os_str().as_encoded_bytes());
        hash.update(&[u8::from(read.is_ok())]);
        hash.update(&(content.len() as u64).to_le_bytes());
        hash.update(&content);
    }
    hash.digest128()
}
