//! `adapter_config.json`: PEFT's `LoraConfig`, with its ranks, scales and targets.

use serde_json::{Map, Value};

use super::{CONFIG_FILE, RANK_MAX, SUPPORTED};
use crate::model::tokenizer::json_object;
use crate::model::{ModelError, ModelFiles};

/// Most entries of `target_modules`, `rank_pattern` and `alpha_pattern`: several for each module of a large model.
const ENTRIES_MAX: usize = 16_384;

/// Fields that do not change the result of a trained adapter.
const WITHOUT_EFFECT: &[&str] = &[
    "auto_mapping",
    "base_model_name_or_path",
    "corda_config",
    "ensure_weight_tying",
    "eva_config",
    "inference_mode",
    "loftq_config",
    "lora_dropout",
    "lora_ga_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "task_type",
];

/// Fields that are read.
const KNOWN: &[&str] = &[
    "alpha_pattern",
    "bias",
    "exclude_modules",
    "init_lora_weights",
    "layers_pattern",
    "layers_to_transform",
    "lora_alpha",
    "peft_type",
    "r",
    "rank_pattern",
    "target_modules",
    "use_rslora",
];

/// Initial values of an adapter that also change the model's own weights.
const CHANGES_THE_MODEL: &[&str] = &["pissa", "olora", "corda", "loftq", "lora_ga"];

/// The properties of an adapter.
#[derive(Debug)]
pub(super) struct LoraConfig {
    rank: usize,
    alpha: f64,
    /// Divide by the root of the rank (rsLoRA).
    by_root: bool,
    /// Modules with another rank or alpha; the first one that matches counts.
    ranks: Vec<(String, usize)>,
    alphas: Vec<(String, f64)>,
    targets: LoraTargets,
    /// Whether every module that the targets name has an adapter.
    is_complete: bool,
}

/// `target_modules`.
#[derive(Debug)]
enum LoraTargets {
    /// Names of modules, or their last parts.
    Names(Vec<String>),
    /// Every linear layer but the output matrix.
    AllLinear,
    /// A regular expression. PEFT has applied it: the tensors of the file are its result.
    Pattern,
}

impl LoraConfig {
    pub(super) fn read(files: &ModelFiles) -> Result<Self, ModelError> {
        let fields = json_object(files, CONFIG_FILE)?;
        Self::of(&fields.ok_or_else(|| ModelError::Missing(CONFIG_FILE.into()))?)
    }

    /// # Errors
    /// A field is missing, of the wrong type or out of range, or it changes the result in a way that is not computed.
    pub(super) fn of(fields: &Map<String, Value>) -> Result<Self, ModelError> {
        refuse_unsupported(fields)?;
        let rank = fields.get("r").ok_or_else(|| malformed("r is absent".into()))?;
        let alpha = fields.get("lora_alpha").ok_or_else(|| malformed("lora_alpha is absent".into()))?;
        let by_root = match fields.get("use_rslora") {
            None | Some(Value::Null) => false,
            Some(value) => value
                .as_bool()
                .ok_or_else(|| malformed(format!("use_rslora is {value}, not true or false")))?,
        };
        let targets = targets(fields.get("target_modules").unwrap_or(&Value::Null))?;
        let restricted = ["layers_to_transform", "exclude_modules"];
        let is_complete = !restricted.iter().any(|name| is_set(fields.get(*name)));
        Ok(Self {
            rank: as_rank("r", rank)?,
            alpha: as_alpha("lora_alpha", alpha)?,
            by_root,
            ranks: pattern(fields, "rank_pattern", as_rank)?,
            alphas: pattern(fields, "alpha_pattern", as_alpha)?,
            is_complete: is_complete && !matches!(targets, LoraTargets::Pattern),
            targets,
        })
    }

    /// Rank of a module's adapter, and the multiplier of `A x`.
    pub(super) fn rank_and_scale(&self, module: &str) -> (usize, f32) {
        let rank = of_module(&self.ranks, module).unwrap_or(self.rank);
        let alpha = of_module(&self.alphas, module).unwrap_or(self.alpha);
        let divisor = if self.by_root { (rank as f64).sqrt() } else { rank as f64 };
        (rank, (alpha / divisor) as f32)
    }

    /// Refuses a target that no projection of the model has.
    pub(super) fn check_targets<'a>(
        &self,
        modules: impl Iterator<Item = &'a str> + Clone,
    ) -> Result<(), ModelError> {
        let LoraTargets::Names(names) = &self.targets else { return Ok(()) };
        match names.iter().find(|name| !modules.clone().any(|module| is_named(module, name))) {
            None => Ok(()),
            Some(unknown) => Err(unsupported(&format!("target_modules {unknown}"))),
        }
    }

    /// Refuses a module that is no target.
    pub(super) fn check_module(&self, module: &str) -> Result<(), ModelError> {
        match &self.targets {
            LoraTargets::Names(names) if !names.iter().any(|name| is_named(module, name)) => {
                Err(malformed(format!("target_modules has no entry for {module}, which has an adapter")))
            }
            LoraTargets::Names(_) | LoraTargets::AllLinear | LoraTargets::Pattern => Ok(()),
        }
    }

    /// Refuses an adapter that lacks one of its targets.
    pub(super) fn check_complete<'a>(
        &self,
        mut modules: impl Iterator<Item = &'a str>,
        has: &dyn Fn(&str) -> bool,
    ) -> Result<(), ModelError> {
        let is_missing = |module: &&str| self.check_module(module).is_ok() && !has(module);
        match modules.find(is_missing).filter(|_| self.is_complete) {
            None => Ok(()),
            Some(module) => Err(malformed(format!("target_modules has {module}, which has no adapter"))),
        }
    }
}

fn malformed(what: String) -> ModelError {
    ModelError::Malformed { file: CONFIG_FILE.into(), what }
}

fn unsupported(what: &str) -> ModelError {
    ModelError::Unsupported { file: CONFIG_FILE.into(), what: what.into(), supported: SUPPORTED.into() }
}

/// Whether a field has a value with an effect.
fn is_set(value: Option<&Value>) -> bool {
    match value {
        None | Some(Value::Null | Value::Bool(false)) => false,
        Some(Value::Array(list)) => !list.is_empty(),
        Some(Value::Object(fields)) => !fields.is_empty(),
        Some(Value::String(text)) => !text.is_empty(),
        Some(Value::Bool(true) | Value::Number(_)) => true,
    }
}

/// Refuses what would change the result, by its name. A field of a later version counts unless it is off.
fn refuse_unsupported(fields: &Map<String, Value>) -> Result<(), ModelError> {
    match fields.get("peft_type").and_then(Value::as_str) {
        Some("LORA") => {}
        Some(other) => return Err(unsupported(&format!("peft_type {other}"))),
        None => return Err(malformed("peft_type is absent".into())),
    }
    match fields.get("bias") {
        None | Some(Value::Null) => {}
        Some(Value::String(bias)) if bias == "none" => {}
        Some(bias) => return Err(unsupported(&format!("bias {bias}"))),
    }
    if let Some(Value::String(initial)) = fields.get("init_lora_weights")
        && CHANGES_THE_MODEL.iter().any(|name| initial.starts_with(name))
    {
        return Err(unsupported(&format!("init_lora_weights {initial}, which also changes the model")));
    }
    let unknown = fields.iter().find(|(name, value)| {
        !KNOWN.contains(&name.as_str()) && !WITHOUT_EFFECT.contains(&name.as_str()) && is_set(Some(*value))
    });
    match unknown {
        None => Ok(()),
        Some((name, value)) => Err(unsupported(&match value {
            Value::Bool(_) | Value::Number(_) | Value::String(_) => format!("{name} {value}"),
            Value::Null | Value::Array(_) | Value::Object(_) => name.clone(),
        })),
    }
}

fn as_rank(name: &str, value: &Value) -> Result<usize, ModelError> {
    let rank = value.as_u64().and_then(|rank| usize::try_from(rank).ok());
    rank.filter(|rank| (1..=RANK_MAX).contains(rank))
        .ok_or_else(|| malformed(format!("{name} is {value}, not a rank from 1 to {RANK_MAX}")))
}

fn as_alpha(name: &str, value: &Value) -> Result<f64, ModelError> {
    // Beyond these bounds a scale would overflow, and no trained adapter comes close.
    let alpha = value.as_f64().filter(|alpha| alpha.abs() <= 1e6);
    alpha.ok_or_else(|| malformed(format!("{name} is {value}, not a number from -1e6 to 1e6")))
}

fn targets(value: &Value) -> Result<LoraTargets, ModelError> {
    match value {
        Value::String(text) if text == "all-linear" => Ok(LoraTargets::AllLinear),
        Value::String(_) => Ok(LoraTargets::Pattern),
        Value::Array(list) if !list.is_empty() && list.len() <= ENTRIES_MAX => {
            let name = |entry: &Value| {
                let name = entry.as_str().map(str::to_owned);
                name.ok_or_else(|| malformed(format!("target_modules has {entry}, not a name")))
            };
            list.iter().map(name).collect::<Result<_, _>>().map(LoraTargets::Names)
        }
        _ => Err(malformed(format!(
            "target_modules must be a text, or a list of 1 to {ENTRIES_MAX} names of modules"
        ))),
    }
}

/// Values by module. PEFT's keys are regular expressions; those of released adapters are names.
fn pattern<T>(
    fields: &Map<String, Value>,
    field: &str,
    read: fn(&str, &Value) -> Result<T, ModelError>,
) -> Result<Vec<(String, T)>, ModelError> {
    let entries = match fields.get(field) {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(entries)) if entries.len() <= ENTRIES_MAX => entries,
        Some(_) => {
            return Err(malformed(format!("{field} must be an object of at most {ENTRIES_MAX} entries")));
        }
    };
    let entry = |(key, value): (&String, &Value)| {
        let name = key.strip_prefix('^').unwrap_or(key);
        if name.is_empty() || !name.bytes().all(|c| c.is_ascii_alphanumeric() || c == b'_' || c == b'.') {
            return Err(ModelError::Unsupported {
                file: CONFIG_FILE.into(),
                what: format!("{field} with the pattern {key}"),
                supported: "supported: names of modules".into(),
            });
        }
        Ok((key.clone(), read(&format!("{field} {key}"), value)?))
    };
    entries.iter().map(entry).collect()
}

/// The value of the first key that names a module.
fn of_module<T: Copy>(entries: &[(String, T)], module: &str) -> Option<T> {
    let matches = |key: &str| match key.strip_prefix('^') {
        Some(whole) => module == whole,
        None => is_named(module, key),
    };
    entries.iter().find(|(key, _)| matches(key)).map(|(_, value)| *value)
}

/// Whether a name is that of a module, or the last parts of it.
fn is_named(module: &str, name: &str) -> bool {
    module.strip_suffix(name).is_some_and(|before| before.is_empty() || before.ends_with('.'))
}
