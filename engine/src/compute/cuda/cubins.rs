//! Machine code on disk, so that kernels are compiled once per machine and not at every start.
//!
//! A file's name is the hash of its inputs: source, architecture and the compiler's version. It begins with a mark and
//! the hash of its bytes, so that a truncated or changed file is compiled again instead of loaded. A rename creates it
//! as a whole, and there are never more than `FILES_MAX`.

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use sha2::{Digest, Sha256};

use super::device::DeviceError;
use super::nvrtc;

/// Names the folder, instead of `baton/kernels` in `XDG_CACHE_HOME` or `~/.cache`.
pub const FOLDER_VARIABLE: &str = "BATON_KERNEL_CACHE";
/// Most files in the folder; each is about 100 KB.
const FILES_MAX: usize = 64;
/// Longest file that is read.
const BYTES_MAX: u64 = 64 << 20;
const MARK: &[u8; 16] = b"baton-kernels-1\n";
const SUFFIX: &str = "cubin";

/// The folder for this user, if the environment names one.
#[must_use]
pub fn folder() -> Option<PathBuf> {
    let variable = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    variable(FOLDER_VARIABLE).or_else(|| {
        let cache = variable("XDG_CACHE_HOME").or_else(|| Some(variable("HOME")?.join(".cache")));
        cache.map(|cache| cache.join("baton").join("kernels"))
    })
}

/// The machine code of a source: read from `folder`, or compiled and written there. An unusable folder only costs time.
///
/// # Errors
/// As [`nvrtc::compile`].
pub fn get(folder: Option<&Path>, source: &str, arch: &str) -> Result<Vec<u8>, DeviceError> {
    let version = nvrtc::version()?;
    let path = folder.map(|folder| folder.join(name(source, arch, version)));
    if let Some(cubin) = path.as_deref().and_then(read) {
        return Ok(cubin);
    }
    tracing::info!(
        event = "kernel_compilation_started",
        arch,
        nvrtc = format!("{}.{}", version.0, version.1),
        "compiling kernels"
    );
    let compiled = nvrtc::compile(source, arch)?;
    if let Some(path) = path
        && let Err(error) = keep(&path, &compiled.cubin)
    {
        tracing::warn!(
            event = "kernel_cache_not_written", %error, path = %path.display(),
            "cannot cache compiled kernels"
        );
    }
    Ok(compiled.cubin)
}

fn name(source: &str, arch: &str, version: (i32, i32)) -> String {
    let mut hash = Sha256::new();
    for part in [source, arch, &format!("{}.{}", version.0, version.1)] {
        hash.update((part.len() as u64).to_le_bytes());
        hash.update(part.as_bytes());
    }
    let digest: String = hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect();
    format!("{digest}.{SUFFIX}")
}

/// The machine code of a complete file.
fn read(path: &Path) -> Option<Vec<u8>> {
    let bytes = fs::metadata(path).ok()?.len();
    if bytes > BYTES_MAX {
        return None;
    }
    let file = fs::read(path).ok()?;
    let rest = file.strip_prefix(MARK)?;
    let (hash, cubin) = rest.split_at_checked(32)?;
    if Sha256::digest(cubin).as_slice() != hash {
        tracing::warn!(
            event = "kernel_cache_damaged", path = %path.display(),
            "cached kernels damaged, compiled again"
        );
        return None;
    }
    Some(cubin.to_vec())
}

fn keep(path: &Path, cubin: &[u8]) -> std::io::Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // Each process writes a file of its own name. Two processes that start at once write the same contents.
    let draft = path.with_extension(format!("{}.draft", std::process::id()));
    let written = (|| {
        let mut file = fs::File::create(&draft)?;
        file.write_all(MARK)?;
        file.write_all(&Sha256::digest(cubin))?;
        file.write_all(cubin)?;
        file.sync_all()?;
        fs::rename(&draft, path)
    })();
    if written.is_err() {
        // The file may not exist.
        let _ = fs::remove_file(&draft);
    }
    written?;
    sweep(folder)
}

/// Removes the oldest files above the bound.
fn sweep(folder: &Path) -> std::io::Result<()> {
    let mut files: Vec<(SystemTime, PathBuf)> = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let ours = path.extension().is_some_and(|suffix| suffix == SUFFIX || suffix == "draft");
        if let (true, Ok(time)) = (ours, fs::metadata(&path).and_then(|data| data.modified())) {
            files.push((time, path));
        }
    }
    files.sort();
    let beyond = files.len().saturating_sub(FILES_MAX);
    for (_, path) in files.into_iter().take(beyond) {
        fs::remove_file(path)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cached_file_is_reused_and_a_damaged_one_is_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("below").join(name("source", "sm_90a", (13, 0)));
        keep(&path, b"machine code").unwrap();
        assert_eq!(read(&path).unwrap(), b"machine code");
        let whole = fs::read(&path).unwrap();
        for cut in [0, 10, 20, whole.len() - 1] {
            fs::write(&path, &whole[..cut]).unwrap();
            assert_eq!(read(&path), None, "{cut} bytes");
        }
        let mut changed = whole;
        *changed.last_mut().unwrap() ^= 1;
        fs::write(&path, changed).unwrap();
        assert_eq!(read(&path), None);
        let left: Vec<_> = fs::read_dir(path.parent().unwrap()).unwrap().collect();
        assert_eq!(left.len(), 1, "no draft is left");
    }

    #[test]
    fn a_file_name_identifies_source_architecture_and_compiler() {
        let here = name("source", "sm_90a", (13, 0));
        assert_eq!(here, name("source", "sm_90a", (13, 0)));
        for other in [
            name("sources", "sm_90a", (13, 0)),
            name("source", "sm_80", (13, 0)),
            name("source", "sm_90a", (13, 1)),
            name("sourcesm", "_90a", (13, 0)),
        ] {
            assert_ne!(here, other);
        }
    }

    #[test]
    fn the_folder_does_not_grow_without_bound() {
        let folder = tempfile::tempdir().unwrap();
        for number in 0..FILES_MAX + 9 {
            keep(&folder.path().join(format!("{number}.{SUFFIX}")), b"x").unwrap();
        }
        fs::write(folder.path().join("not-ours.txt"), "x").unwrap();
        sweep(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), FILES_MAX + 1);
    }
}
