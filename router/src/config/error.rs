//! Why a configuration cannot be used: every problem with its place.

use std::fmt;

/// A place in a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Place {
    /// From 1.
    pub line: usize,
    /// In characters, from 1.
    pub column: usize,
}

/// One thing that is wrong with a text.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Problem {
    /// Where.
    pub place: Place,
    /// What, in words that name the key.
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
        /// Why.
        source: std::io::Error,
    },
    /// What is in it is not a configuration. Each problem is a line: `FILE:LINE:COLUMN: what`.
    #[error("{}", Lines(name, problems))]
    Invalid {
        /// The file.
        name: String,
        /// At least one, in the order of the text.
        problems: Vec<Problem>,
    },
}

struct Lines<'a>(&'a str, &'a [Problem]);

impl fmt::Display for Lines<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, Problem { place: Place { line, column }, what }) in self.1.iter().enumerate() {
            let gap = if at == 0 { "" } else { "\n" };
            write!(f, "{gap}{}:{line}:{column}: {what}", self.0)?;
        }
        Ok(())
    }
}
