//! Reads a configuration file: its text, its document with positions, its shape, its values, and contradictions between
//! keys.

pub(crate) mod contradictions;
pub(crate) mod document;
mod hints;
pub(crate) mod named_file;
pub(crate) mod schema;
pub(crate) mod shape;

use std::path::Path;

use garde::Validate;

use super::RouterConfig;
use super::error::{ConfigError, Problem, SourcePosition};
use document::{Document, DocumentError};

/// Largest file that contains one secret, in bytes.
const SECRET_BYTES_MAX: u64 = 1 << 20;
/// Largest file of keys, in bytes: 100,000 keys of 640 bytes.
const KEYS_BYTES_MAX: u64 = 64 << 20;

/// The text of a file, cut one byte above [`document::BYTES_MAX`].
pub(crate) fn text_of(path: &Path) -> Result<String, ConfigError> {
    let name = path.display().to_string();
    let unreadable = |source| ConfigError::Unreadable { name: name.clone(), source };
    let mut text = String::new();
    // The additional byte shows that the file is too large.
    let most = u64::try_from(document::BYTES_MAX).expect("a small number") + 1;
    let file = std::fs::File::open(path).map_err(unreadable)?;
    std::io::Read::read_to_string(&mut std::io::Read::take(file, most), &mut text).map_err(unreadable)?;
    Ok(text)
}

/// The first line of a file that contains a secret; `None` if the line is empty. Errors contain `key`, which names the
/// file.
///
/// # Errors
/// [`ConfigError::Unreadable`].
pub(crate) fn first_line_of(key: &str, path: &Path) -> Result<Option<String>, ConfigError> {
    let name = format!("{key}: {}", path.display());
    let text = named_file::read_text(path, SECRET_BYTES_MAX)
        .map_err(|source| ConfigError::Unreadable { name, source })?;
    Ok(text.lines().next().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()))
}

/// Reads and checks a YAML file that belongs to the configuration.
///
/// # Errors
/// [`ConfigError`] with the problem and its position.
pub(crate) fn load_checked<T>(path: &Path) -> Result<T, ConfigError>
where
    T: serde::de::DeserializeOwned + Validate<Context = ()>,
{
    let name = path.display().to_string();
    let text = named_file::read_text(path, KEYS_BYTES_MAX)
        .map_err(|source| ConfigError::Unreadable { name: name.clone(), source })?;
    let wrong = |what| Problem { position: SourcePosition { line: 1, column: 1 }, what };
    let checked = typed::<T>(&text).and_then(|value| match value.validate() {
        Ok(()) => Ok(value),
        Err(report) => Err(wrong(report.to_string().trim().replace('\n', "; "))),
    });
    checked.map_err(|problem| ConfigError::Invalid { name, problems: vec![problem] })
}

/// Reads a configuration. Each step needs the result of the step before: a tree, a tree of known keys, values, and
/// values within their bounds.
pub(super) fn config(text: &str) -> Result<RouterConfig, Vec<Problem>> {
    let document =
        Document::read(text).map_err(|DocumentError { position, what }| vec![Problem { position, what }])?;
    let mut problems = shape::misfits(&RouterConfig::schema(), &document.root);
    problems.extend(document.repeated.iter().map(|(position, name, first)| Problem {
        position: *position,
        what: format!("the key `{name}` is given twice, first in line {}", first.line),
    }));
    if !problems.is_empty() {
        return Err(problems);
    }
    let config: RouterConfig = typed(text).map_err(|problem| vec![with_key(problem, &document.root)])?;
    let errors = config.validate().err().map(garde::Report::into_inner).unwrap_or_default();
    let errors = errors.into_iter().map(|(path, error)| (path.to_string(), error.to_string()));
    let to_problem = |(path, what): (String, String)| Problem {
        position: document.root.position_of(&path),
        what: if path.is_empty() { what } else { format!("`{path}`: {what}") },
    };
    let mut problems: Vec<_> = errors.map(to_problem).collect();
    // Contradictions between values that are out of their bounds add no information.
    if problems.is_empty() {
        problems.extend(contradictions::find(&config).into_iter().map(to_problem));
    }
    if problems.is_empty() { Ok(config) } else { Err(problems) }
}

fn typed<T: serde::de::DeserializeOwned>(text: &str) -> Result<T, Problem> {
    let options = serde_saphyr::options! {
        // `Document::read` has bounded the aliases. Many engines may share one anchor.
        budget: serde_saphyr::budget! { enforce_alias_anchor_ratio: false },
        with_snippet: false,
    };
    serde_saphyr::from_str_with_options(text, options).map_err(|error| {
        let location = error.location();
        let at = |number: u64| usize::try_from(number).unwrap_or(usize::MAX);
        Problem {
            position: SourcePosition {
                line: location.map_or(1, |p| at(p.line())),
                column: location.map_or(1, |p| at(p.column())),
            },
            what: strip_position(&error.to_string()),
        }
    })
}

/// Adds the path of the key to a problem of its value.
fn with_key(problem: Problem, root: &document::YamlNode) -> Problem {
    match root.path_at(problem.position) {
        Some(path) if !problem.what.contains(&path) => {
            Problem { what: format!("`{path}`: {}", problem.what), ..problem }
        }
        _ => problem,
    }
}

/// The first line of an error of the deserializer, without its position and prefix.
fn strip_position(message: &str) -> String {
    let line = message.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    let line = line.rsplit_once(" at line ").map_or(line, |(what, _)| what);
    line.strip_prefix("error: ").unwrap_or(line).to_owned()
}
