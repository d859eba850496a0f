//! Golden files: prompts, tokens and log-probabilities as JSON, raw logits as safetensors.

use std::collections::HashMap;
use std::path::Path;

use safetensors::SafeTensors;
use serde::Deserialize;

use super::ParityError;

/// Golden outputs of one model.
#[derive(Debug)]
pub struct Golden {
    /// The whole JSON file, for cases that read other parts of it.
    pub json: serde_json::Value,
    /// Prompts with their continuations.
    pub prompts: Vec<GoldenPrompt>,
    /// Tokens that end a completion.
    pub eos_token_ids: Vec<u32>,
    /// The effect of bf16 on this model.
    pub noise: ReferenceNoise,
    tensors: HashMap<String, Vec<f32>>,
}

/// Distance of the reference's bf16 run from its own float32 run, step by step under the tokens of the latter: the
/// effect of bf16 alone on this model.
#[derive(Clone, Copy, Debug, Deserialize)]
pub struct ReferenceNoise {
    /// The largest difference of a logit.
    #[serde(rename = "bf16_vs_f32_max_abs")]
    pub logit: f64,
    /// The root of the mean square of the differences of logits.
    #[serde(rename = "bf16_vs_f32_rms")]
    pub logit_rms: f64,
    /// Mean divergence of a step, in nats.
    #[serde(rename = "bf16_vs_f32_kl_mean")]
    pub divergence: f64,
    /// The largest divergence of a step.
    #[serde(rename = "bf16_vs_f32_kl_max")]
    pub divergence_max: f64,
}

impl ReferenceNoise {
    /// Reads the distances from a golden file.
    fn read(json: &serde_json::Value) -> Result<Self, String> {
        let noise = Self::deserialize(&json["noise"]).map_err(|error| format!("noise: {error}"))?;
        let numbers = [noise.logit, noise.logit_rms, noise.divergence, noise.divergence_max];
        match numbers.iter().all(|number| number.is_finite() && *number > 0.0) {
            true => Ok(noise),
            false => Err(format!("noise: {noise:?}; every distance must be above 0")),
        }
    }
}

/// One prompt.
#[derive(Clone, Debug, Deserialize)]
pub struct GoldenPrompt {
    /// Token ids of the prompt.
    pub ids: Vec<u32>,
    /// Weights upcast to float32, float32 arithmetic.
    pub f32: GoldenRun,
    /// Weights and activations in bfloat16, for bfloat16 checkpoints only.
    pub bf16: Option<GoldenRun>,
}

/// A greedy continuation that does not stop at an end-of-sequence token.
#[derive(Clone, Debug, Deserialize)]
pub struct GoldenRun {
    /// The continuation.
    pub greedy_ids: Vec<u32>,
    /// The most likely tokens of each step.
    pub top_ids: Vec<Vec<u32>>,
    /// Their natural log-probabilities, rounded to 6 places.
    pub top_logprobs: Vec<Vec<f64>>,
    /// Log-probability of each prompt token after the first.
    pub prompt_logprobs: Vec<f64>,
}

#[derive(Deserialize)]
struct GoldenFile {
    prompts: Vec<GoldenPrompt>,
    eos_token_ids: Vec<u32>,
}

/// Models of a folder, by their golden files.
pub(super) fn names(dir: &Path) -> Result<Vec<String>, ParityError> {
    let folder = dir.join("golden");
    let failed = |what: String| ParityError::Golden { path: folder.clone(), what };
    let mut names = Vec::new();
    for entry in std::fs::read_dir(&folder).map_err(|error| failed(error.to_string()))? {
        let path = entry.map_err(|error| failed(error.to_string()))?.path();
        if path.extension().is_some_and(|extension| extension == "json")
            && let Some(name) = path.file_stem()
        {
            names.push(name.to_string_lossy().into_owned());
        }
    }
    if names.is_empty() {
        return Err(failed("holds no golden files".into()));
    }
    names.sort();
    Ok(names)
}

impl Golden {
    /// Reads the golden files of one model.
    ///
    /// # Errors
    /// [`ParityError::Golden`] when one is missing or malformed.
    pub fn read(dir: &Path, name: &str) -> Result<Self, ParityError> {
        let path = |extension: &str| dir.join("golden").join(format!("{name}.{extension}"));
        let failed = |path: &Path, what: String| ParityError::Golden { path: path.to_owned(), what };
        let read = |path: &Path| std::fs::read(path).map_err(|error| failed(path, error.to_string()));
        let json_path = path("json");
        let malformed = |error: serde_json::Error| failed(&json_path, error.to_string());
        let json: serde_json::Value = serde_json::from_slice(&read(&json_path)?).map_err(malformed)?;
        let file = GoldenFile::deserialize(&json).map_err(malformed)?;
        let noise = ReferenceNoise::read(&json).map_err(|what| failed(&json_path, what))?;

        let tensor_path = path("safetensors");
        let bytes = read(&tensor_path)?;
        let parsed =
            SafeTensors::deserialize(&bytes).map_err(|error| failed(&tensor_path, error.to_string()))?;
        let tensors = parsed
            .tensors()
            .into_iter()
            .map(|(name, view)| {
                let values =
                    view.data().as_chunks::<4>().0.iter().map(|raw| f32::from_le_bytes(*raw)).collect();
                (name, values)
            })
            .collect();
        Ok(Self { json, prompts: file.prompts, eos_token_ids: file.eos_token_ids, noise, tensors })
    }

    /// Positions of the longest prompt with its continuation.
    #[must_use]
    pub fn longest(&self) -> usize {
        let tokens = |prompt: &GoldenPrompt| {
            let bf16 = prompt.bf16.as_ref().map_or(0, |run| run.greedy_ids.len());
            prompt.ids.len() + prompt.f32.greedy_ids.len().max(bf16)
        };
        self.prompts.iter().map(tokens).max().unwrap_or(1)
    }

    /// Whether every prompt has a bf16 run.
    #[must_use]
    pub fn has_bf16(&self) -> bool {
        self.prompts.iter().all(|prompt| prompt.bf16.is_some())
    }

    /// Raw logits, if they were recorded: `RUN.PROMPT.steps`, `.prompt_last` or `.prompt_all`, rows of the vocabulary
    /// in sequence.
    #[must_use]
    pub fn tensor(&self, run: &str, prompt: usize, what: &str) -> Option<&[f32]> {
        self.tensors.get(&format!("{run}.{prompt}.{what}")).map(Vec::as_slice)
    }
}
