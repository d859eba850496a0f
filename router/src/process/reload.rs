//! The configuration is read again when it changes, and put into effect while the router runs.
//!
//! ```text
//! every poll_ms ─▶ read the file and its secrets     ─▶ as before? ─ yes ─▶ nothing
//! SIGHUP ────────▶            (content, not times)          │ no
//!                                                           ▼
//!                                     read until twice the same (a writer may be at work)
//!                                                           ▼
//!                           check whole ─ wrong ─▶ rejected: logged, counted, the old one stays
//!                                │ sound
//!                                ▼
//!                           next generation ─▶ accepted: logged, counted
//! ```
//!
//! Content is compared, so it does not matter how it was replaced: an editor's rename, a ConfigMap's switch of symbolic
//! links, a network file system without notifications. What was rejected is tried again when it changes again.
//!
//! API keys, the admin token and certificates are not part of that content: they are followed by those who use them
//! (`server.rs`), at the same times.

use std::collections::BTreeSet;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use xxhash_rust::xxh3::Xxh3;

use crate::config::{ConfigError, RouterConfig, named_file};
use crate::state::generation::GenerationError;
use crate::state::shared::Shared;

/// Between two reads that must be the same.
const SETTLE: Duration = Duration::from_millis(20);
/// Reads until a file that never comes to rest is taken as it is.
const READS_MAX: usize = 50;
/// What is looked at of a file that the configuration names; certificates and keys are far smaller.
const NAMED_BYTES_MAX: u64 = 4 << 20;
/// Without polling, how long until it is looked whether it was turned on.
const IDLE: Duration = Duration::from_secs(3600);

/// A hand on a router that runs: replaces its configuration.
#[derive(Clone)]
pub struct Reload(pub(crate) Arc<Shared>);

impl Reload {
    /// Puts a configuration into effect for every request that begins from now on, whole or not at all.
    /// Requests in flight finish on the one they began with. Gives the new generation's number.
    ///
    /// The listeners stay as they are: `listen` and `admin.listen` take effect at a restart. It reads the files that the
    /// configuration names: not for a thread that serves.
    ///
    /// # Errors
    /// [`GenerationError`] says what is wrong; the configuration in effect stays.
    pub fn install(&self, config: RouterConfig) -> Result<u64, GenerationError> {
        let before = self.0.generation();
        let (changes, restart) = (before.config.changes(&config), self.0.reloads.restart(&config));
        match self.0.install(config) {
            Ok(number) => {
                for key in &restart {
                    tracing::warn!(key, "changed key takes effect at the next start");
                }
                tracing::info!(generation = number, changes = changes.len(), "configuration accepted");
                changes.iter().take(64).for_each(|change| tracing::debug!(change, "configuration changed"));
                self.0.metrics.config.accepted();
                self.0.reloads.note(None, restart);
                Ok(number)
            }
            Err(error) => {
                self.reject(&error.to_string());
                Err(error)
            }
        }
    }

    /// Keeps the configuration as the file says, until it is dropped: reads it again every `reload.poll_ms`, and
    /// whenever something is `told`, which also puts an unchanged configuration into effect anew.
    pub async fn follow(&self, file: ConfigFile, mut told: mpsc::Receiver<()>) {
        let ConfigFile { path, mut watched, mut known } = file;
        let name = path.display().to_string();
        loop {
            let poll = self.0.generation().config.reload.poll_ms;
            let pause = if poll == 0 { IDLE } else { Duration::from_millis(poll) };
            let was_told = tokio::select! {
                Some(()) = told.recv() => true,
                () = tokio::time::sleep(pause) => false,
            };
            if !was_told && poll == 0 {
                continue;
            }
            let mut now = Content::look(&path, &watched).await;
            if now == known && !was_told {
                continue;
            }
            for _ in 0..READS_MAX {
                tokio::time::sleep(SETTLE).await;
                let again = Content::look(&path, &watched).await;
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
                    // Hashed before they are used: what changes in between is seen at the next look. A configuration
                    // that is rejected for a file that it names is tried again when that file changes.
                    let accepted = config.watched_files();
                    let rejected = &self.0.generation().config.watched_files() | &config.files();
                    let hash_accepted = Content::look(&path, &accepted).await.named;
                    let hash_rejected = Content::look(&path, &rejected).await.named;
                    // What is wrong is told by `install`.
                    (watched, now.named) = match self.installed(config).await {
                        true => (accepted, hash_accepted),
                        false => (rejected, hash_rejected),
                    };
                }
                Err(error) => self.reject(&error),
            }
            known = now;
            if was_told {
                // And what is not read with the configuration.
                self.0.reread.notify_one();
            }
        }
    }

    /// [`Self::install`] where files may be read.
    async fn installed(&self, config: RouterConfig) -> bool {
        let reload = self.clone();
        let installed = tokio::task::spawn_blocking(move || reload.install(config).is_ok()).await;
        installed.unwrap_or(false)
    }

    fn reject(&self, error: &str) {
        error.lines().for_each(|problem| {
            tracing::error!(problem, "configuration rejected, the old one stays in effect")
        });
        self.0.metrics.config.rejected();
        self.0.reloads.note(Some(error.to_owned()), Vec::new());
    }
}

/// A configuration's file, as it was when the configuration in effect was read from it.
#[derive(Debug)]
pub struct ConfigFile {
    path: PathBuf,
    /// The files that it names and that nobody else follows.
    watched: BTreeSet<PathBuf>,
    known: Content,
}

impl ConfigFile {
    /// Reads the file and remembers what it read, so that no change is missed from then on.
    ///
    /// # Errors
    /// [`ConfigError`] with every problem and its place.
    pub fn load(path: &Path) -> Result<(Self, RouterConfig), ConfigError> {
        let text = RouterConfig::read_text(path)?;
        let config = RouterConfig::from_yaml(&text, &path.display().to_string())?;
        let watched = config.watched_files();
        // Hashed before anybody uses them.
        let known = Content { text: Ok(text), named: hash(&watched) };
        Ok((Self { path: path.to_owned(), watched, known }, config))
    }
}

/// What was read at one moment.
#[derive(Debug, PartialEq, Eq)]
struct Content {
    text: Result<String, String>,
    /// A hash of the files that the configuration names.
    named: u128,
}

impl Content {
    async fn look(path: &Path, named: &BTreeSet<PathBuf>) -> Self {
        let (path, named) = (path.to_owned(), named.clone());
        let read = tokio::task::spawn_blocking(move || {
            let text = RouterConfig::read_text(&path).map_err(|error| error.to_string());
            Self { text, named: hash(&named) }
        });
        read.await.unwrap_or_else(|error| Self { text: Err(error.to_string()), named: 0 })
    }
}

/// A hash of the content of some files, and of which can be read.
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
