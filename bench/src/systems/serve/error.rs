//! Errors of the options of `baton bench serve`.

/// An option has an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum OptionError {
    #[error("{0} has to be {1}")]
    Option(&'static str, &'static str),
    #[error("--goodput: `{0}` is not ttft:MS, tpot:MS or e2e:MS")]
    Goodput(String),
    #[error("--extra-body: {0}")]
    ExtraBody(String),
}
