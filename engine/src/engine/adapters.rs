//! The adapters of an engine: their names checked, and their files read.

use std::path::PathBuf;
use std::sync::Arc;

use crate::blocks::adapter::BlockAdapter;
use crate::compute::cuda::DeviceChoice;
use crate::model::ModelFiles;
use crate::model::config::ModelConfig;
use crate::model::lora::{ADAPTERS_MAX, AdapterIndex, LoraAdapter};
use crate::run::options::{EngineOptions, StartError};
use crate::server::ServedAdapter;

/// Longest name of an adapter, as that of a model at the router.
const NAME_MAX: usize = 256;

/// All adapters, by their index.
pub(super) struct Adapters {
    /// For executors.
    pub(super) loaded: Arc<[LoraAdapter]>,
    /// For requests.
    pub(super) served: Vec<ServedAdapter>,
}

impl Adapters {
    /// Reads the adapters of the options for the model with this name.
    ///
    /// # Errors
    /// [`StartError::Options`] with the option, for a device without adapters, a name that cannot be served, and files
    /// that do not fit the model.
    pub(super) fn open(
        options: &EngineOptions,
        model: &str,
        config: &ModelConfig,
    ) -> Result<Self, StartError> {
        let wanted = &options.served.adapters;
        if !wanted.is_empty() && options.device != DeviceChoice::Cpu {
            return Err(StartError::Options(format!("--lora needs --device cpu, not {}", options.device)));
        }
        check_names(wanted, model).map_err(StartError::Options)?;
        let (mut loaded, mut served) = (Vec::with_capacity(wanted.len()), Vec::with_capacity(wanted.len()));
        for (index, (name, folder)) in wanted.iter().enumerate() {
            let adapter = LoraAdapter::open(folder, config).map_err(|error| {
                StartError::Options(format!("--lora {name}={}: {error}", folder.display()))
            })?;
            let blocks = BlockAdapter {
                index: AdapterIndex(index),
                name: name.as_str().into(),
                digest: adapter.digest,
            };
            let root = Some(ModelFiles::Dir(folder.clone()).default_name());
            served.push(ServedAdapter { blocks: Arc::new(blocks), root });
            loaded.push(adapter);
        }
        Ok(Self { loaded: loaded.into(), served })
    }
}

/// Refuses names that requests could not use.
fn check_names(adapters: &[(String, PathBuf)], model: &str) -> Result<(), String> {
    if adapters.len() > ADAPTERS_MAX {
        return Err(format!("--lora {} times; at most {ADAPTERS_MAX} adapters are served", adapters.len()));
    }
    for (at, (name, _)) in adapters.iter().enumerate() {
        if name.is_empty() || name.len() > NAME_MAX || name.chars().any(char::is_control) {
            return Err(format!(
                "--lora {name:?}: a name has from 1 to {NAME_MAX} bytes and no control characters"
            ));
        }
        if name == model {
            return Err(format!("--lora {name}: this is the name of the model"));
        }
        if adapters[..at].iter().any(|(earlier, _)| earlier == name) {
            return Err(format!("--lora {name}: there are two adapters with this name"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_bounded_and_name_one_thing() {
        let check = |names: &[&str]| {
            let adapters: Vec<_> = names.iter().map(|name| ((*name).to_owned(), PathBuf::new())).collect();
            check_names(&adapters, "base")
        };
        assert_eq!(check(&[]), Ok(()));
        assert_eq!(check(&["sql", "é/1", &"n".repeat(256)]), Ok(()));
        for (names, words) in [
            (&["sql", "base"][..], "the name of the model"),
            (&["sql", "chat", "sql"][..], "two adapters"),
            (&[""][..], "from 1 to 256 bytes"),
            (&["a\nb"][..], "no control characters"),
            (&[&*"n".repeat(257)][..], "from 1 to 256 bytes"),
        ] {
            let error = check(names).expect_err(words);
            assert!(error.contains(words), "{error}");
        }
        let many: Vec<String> = (0..65).map(|n| n.to_string()).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        assert!(check(&many).expect_err("too many").contains("at most 64"));
        assert_eq!(check(&many[1..]), Ok(()));
    }
}
