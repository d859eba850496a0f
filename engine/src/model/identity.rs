//! A short name of a checkpoint's computation, so that two engines share KV blocks only if they run the same weights.
//! Two models with the same shape must never share a block.

use sha2::{Digest, Sha256};

use super::weights::weight_files;
use super::{ModelError, ModelFiles};

/// Bytes of each weight file that are read at its start at least.
const HEAD_BYTES: usize = 64 * 1024;

/// Bytes of the longest header that is read whole. The `safetensors` crate refuses those above 100 MB.
const MAX_HEADER_BYTES: usize = 128 << 20;

/// Samples of each weight file, evenly spaced to its end. A changed model has whole changed tensors.
const SAMPLES: usize = 512;

/// Bytes of one sample.
const SAMPLE_BYTES: usize = 4 * 1024;

/// Hexadecimal digest over `config.json`, the header of every weight file (metadata, and names, types and shapes of
/// tensors), and samples of it.
///
/// Only file contents matter: the names of folders do not count.
///
/// # Errors
/// [`ModelError`] when a file is missing or cannot be read.
pub fn identity(files: &ModelFiles) -> Result<String, ModelError> {
    let mut hash = Sha256::new();
    let config = files.open("config.json")?.ok_or_else(|| ModelError::Missing("config.json".into()))?;
    hash.update(&*config);
    for (file, name) in weight_files(files)?.into_iter().enumerate() {
        let bytes = files.open(&name)?.ok_or_else(|| ModelError::Missing(name.clone()))?;
        let header = match files {
            ModelFiles::Gguf(gguf) => gguf.header_end(file)?,
            ModelFiles::Dir(_) | ModelFiles::BuiltIn { .. } => safetensors_header_end(&bytes),
        };
        hash.update((bytes.len() as u64).to_le_bytes());
        hash.update(&bytes[..bytes.len().min(header.clamp(HEAD_BYTES, MAX_HEADER_BYTES))]);
        let last = bytes.len().saturating_sub(SAMPLE_BYTES);
        for sample in 1..=SAMPLES {
            let start = (last as u128 * sample as u128 / SAMPLES as u128) as usize;
            hash.update(&bytes[start..bytes.len().min(start + SAMPLE_BYTES)]);
        }
    }
    Ok(hash.finalize()[..16].iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Where the tensors of a safetensors file begin: its first number is the length of the header behind it. 0 if the
/// file is shorter, which opening it refuses.
fn safetensors_header_end(bytes: &[u8]) -> usize {
    let len = bytes.first_chunk::<8>().and_then(|len| usize::try_from(u64::from_le_bytes(*len)).ok());
    len.and_then(|len| len.checked_add(8)).filter(|end| *end <= bytes.len()).unwrap_or(0)
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

    #[test]
    fn a_name_far_within_a_long_header_counts() {
        let mut weights = vec![1; 40 << 20];
        weights[..8].copy_from_slice(&(1_u64 << 20).to_le_bytes());
        let (_a, here) = files(&weights);
        // Samples of a file of 40 MiB are 80 KiB apart, so this byte is between two.
        weights[130_000] = 2;
        let (_b, other) = files(&weights);
        assert_ne!(identity(&here).expect("read"), identity(&other).expect("read"));
        assert_eq!(safetensors_header_end(&weights), (1 << 20) + 8);
        assert_eq!(safetensors_header_end(&[255; 16]), 0);
        assert_eq!(safetensors_header_end(&[1; 7]), 0);
    }
}
