//! A short name of a checkpoint's computation, so that two engines share KV blocks only if they run the same weights.
//! Two models with the same shape must never share a block.

use sha2::{Digest, Sha256};

use super::weights::weight_files;
use super::{ModelError, ModelFiles};

/// Bytes of each weight file that are read at its start, which contains the header with names, types and shapes.
const HEAD_BYTES: usize = 64 * 1024;

/// Samples of each weight file, evenly spaced to its end. A changed model has whole changed tensors.
const SAMPLES: usize = 512;

/// Bytes of one sample.
const SAMPLE_BYTES: usize = 4 * 1024;

/// Hexadecimal digest over `config.json` and samples of every weight file.
///
/// Only file contents matter: the names of folders do not count.
///
/// # Errors
/// [`ModelError`] when a file is missing or cannot be read.
pub fn identity(files: &ModelFiles) -> Result<String, ModelError> {
    let mut hash = Sha256::new();
    let config = files.open("config.json")?.ok_or_else(|| ModelError::Missing("config.json".into()))?;
    hash.update(&*config);
    for name in weight_files(files)? {
        let bytes = files.open(&name)?.ok_or_else(|| ModelError::Missing(name.clone()))?;
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(&bytes[..bytes.len().min(HEAD_BYTES)]);
        let last = bytes.len().saturating_sub(SAMPLE_BYTES);
        for sample in 1..=SAMPLES {
            let start = (last as u128 * sample as u128 / SAMPLES as u128) as usize;
            hash.update(&bytes[start..bytes.len().min(start + SAMPLE_BYTES)]);
        }
    }
    Ok(hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(weights: &[u8]) -> (tempfile::TempDir, ModelFiles) {
        let dir = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(dir.path().join("config.json"), "{}").expect("written");
        std::fs::write(dir.path().join("model.safetensors"), weights).expect("written");
        let files = ModelFiles::Dir(dir.path().to_owned());
        (dir, files)
    }

    #[test]
    fn other_weights_of_the_same_shape_are_another_model() {
        let (_a, here) = files(&[1; 1000]);
        let (_b, same) = files(&[1; 1000]);
        let (_c, other) = files(&[2; 1000]);
        assert_eq!(identity(&here).expect("read"), identity(&same).expect("read"));
        assert_ne!(identity(&here).expect("read"), identity(&other).expect("read"));
        let mut tuned = vec![1; 40 << 20];
        let (_d, base) = files(&tuned);
        // One tensor of 128 KiB somewhere in 40 MiB.
        tuned[9_000_000..9_131_072].fill(2);
        let (_e, tuned) = files(&tuned);
        assert_ne!(identity(&base).expect("read"), identity(&tuned).expect("read"));
    }
}
