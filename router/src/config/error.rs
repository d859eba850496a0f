//! Why a configuration cannot be used.

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("{name}: {source}")]
    Unreadable {
        /// The file.
        name: String,
        /// Why.
        source: std::io::Error,
    },
    /// What is in it is not a configuration.
    #[error("{name}:{line}:{column}: {what}")]
    Invalid {
        /// The file.
        name: String,
        /// From 1.
        line: u64,
        /// From 1.
        column: u64,
        /// What is wrong.
        what: String,
    },
}
