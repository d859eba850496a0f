//! Errors of a configuration: every problem with its position.

use std::fmt;

/// A position in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct SourcePosition {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
}

/// One problem of a text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Position of the problem.
    pub position: SourcePosition,
    /// Description of the problem; it names the key.
    pub what: String,
}

/// A configuration that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// A file cannot be read.
    #[error("{name}: {source}")]
    Unreadable {
        /// The file.
        name: String,
        /// Why the file cannot be read.
        source: std::io::Error,
    },
    /// The content is not a valid configuration. Each problem is one line: `FILE:LINE:COLUMN: what`.
    #[error("{}", ProblemLines(name, problems))]
    Invalid {
        /// The file.
        name: String,
        /// At least one, in the order of the text.
        problems: Vec<Problem>,
    },
}

struct ProblemLines<'a>(&'a str, &'a [Problem]);

impl fmt::Display for ProblemLines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Problem { position: SourcePosition { line, column }, what }) in self.1.iter().enumerate() {
            let gap = if at == 0 { "" } else { "\n" };
            write!(f, "{gap}{}:{line}:{column}: {what}", self.0)?;
        }
        Ok(())
    }
}
