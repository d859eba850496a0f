//! Why the options of a sidecar are invalid.

/// Why options are invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SidecarError {
    /// llm-d's sidecar has the flag, and this one does not.
    #[error("`--{name}` is not supported: {why}")]
    Unsupported {
        /// The flag.
        name: String,
        /// The missing part.
        why: &'static str,
    },
    /// Neither has the key.
    #[error("the configuration has an unknown key `{0}`")]
    UnknownKey(String),
    /// The YAML text is invalid.
    #[error("the configuration: {0}")]
    Yaml(String),
    /// A value is invalid.
    #[error("`--{flag}` {what}")]
    Value {
        /// The flag.
        flag: &'static str,
        /// The problem.
        what: String,
    },
}
