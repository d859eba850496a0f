//! The configuration of speculative decoding, in vLLM's spelling: `--speculative-config '{"method": "ngram", …}'`.

use serde::Deserialize;
use serde_json::Value;

use crate::scheduler::{DRAFTS_MAX, LOOKUP_MAX, PromptLookup};

/// The only method. vLLM also accepts the name in brackets.
const NGRAM: [&str; 2] = ["ngram", "[ngram]"];

/// Tokens that must have occurred before, if neither bound is given: vLLM's default.
const LOOKUP: usize = 5;

/// The fields of vLLM's `SpeculativeConfig` that `ngram` uses.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SpeculationFields {
    #[serde(rename = "method")]
    _method: String,
    num_speculative_tokens: Option<usize>,
    prompt_lookup_max: Option<usize>,
    prompt_lookup_min: Option<usize>,
}

/// Why a configuration is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SpeculationError {
    /// It is not a JSON object of the known fields.
    #[error("{0}")]
    Json(String),
    /// A method that this engine does not have.
    #[error("`method` must be \"ngram\" (prompt lookup), not {0}")]
    Method(String),
    /// The number of drafts is missing or out of range.
    #[error("`num_speculative_tokens` must be from 1 to {DRAFTS_MAX}")]
    Drafts,
    /// The bounds of the compared tokens are out of range.
    #[error(
        "`prompt_lookup_min` and `prompt_lookup_max` must be from 1 to {LOOKUP_MAX}, and min at most max"
    )]
    Lookup,
}

/// Reads the JSON of `--speculative-config`. One bound of the compared tokens alone is both, as in vLLM.
///
/// # Errors
/// [`SpeculationError`], naming the field.
pub fn parse_speculation(json: &str) -> Result<PromptLookup, SpeculationError> {
    let wrong = |error: serde_json::Error| SpeculationError::Json(error.to_string());
    let value: Value = serde_json::from_str(json).map_err(wrong)?;
    if !value.is_object() {
        return Err(SpeculationError::Json("expected an object".to_owned()));
    }
    if value["method"].as_str().is_none_or(|method| !NGRAM.contains(&method)) {
        return Err(SpeculationError::Method(value["method"].to_string()));
    }
    // Only now: the fields of other methods are unknown here.
    let fields: SpeculationFields = serde_json::from_value(value).map_err(wrong)?;
    let (min, max) = (fields.prompt_lookup_min, fields.prompt_lookup_max);
    let (shortest, longest) = (min.or(max).unwrap_or(LOOKUP), max.or(min).unwrap_or(LOOKUP));
    let drafts = fields.num_speculative_tokens.filter(|drafts| (1..=DRAFTS_MAX).contains(drafts));
    let drafts = drafts.ok_or(SpeculationError::Drafts)?;
    PromptLookup::new(drafts, shortest, longest).ok_or(SpeculationError::Lookup)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ngram(fields: &str) -> Result<PromptLookup, SpeculationError> {
        parse_speculation(&format!("{{\"method\": \"ngram\"{fields}}}"))
    }

    #[test]
    fn bounds_have_vllms_defaults() {
        for (fields, shortest, longest) in [
            ("", 5, 5),
            (r#", "prompt_lookup_max": 4"#, 4, 4),
            (r#", "prompt_lookup_min": 2"#, 2, 2),
            (r#", "prompt_lookup_min": 2, "prompt_lookup_max": 4"#, 2, 4),
            (r#", "prompt_lookup_min": null, "prompt_lookup_max": 3"#, 3, 3),
        ] {
            let fields = format!(", \"num_speculative_tokens\": 3{fields}");
            assert_eq!(ngram(&fields).ok(), PromptLookup::new(3, shortest, longest), "{fields}");
        }
        let bracketed = parse_speculation(r#"{"method": "[ngram]", "num_speculative_tokens": 1}"#);
        assert_eq!(bracketed.ok(), PromptLookup::new(1, 5, 5));
    }

    #[test]
    fn wrong_fields_are_named() {
        assert_eq!(ngram(""), Err(SpeculationError::Drafts));
        for drafts in [0, 17] {
            let fields = format!(", \"num_speculative_tokens\": {drafts}");
            assert_eq!(ngram(&fields), Err(SpeculationError::Drafts), "{fields}");
        }
        for bounds in [
            r#""prompt_lookup_min": 0"#,
            r#""prompt_lookup_max": 33"#,
            r#""prompt_lookup_min": 4, "prompt_lookup_max": 3"#,
        ] {
            let fields = format!(", \"num_speculative_tokens\": 3, {bounds}");
            assert_eq!(ngram(&fields), Err(SpeculationError::Lookup), "{fields}");
        }
        for (json, what) in [
            ("ngram", "expected"),
            ("[]", "expected"),
            (r#"{"num_speculative_tokens": 3}"#, "`method` must be \"ngram\" (prompt lookup), not null"),
            (r#"{"method": "eagle3", "model": "x"}"#, "not \"eagle3\""),
            (r#"{"method": "ngram", "num_speculative_tokens": "3"}"#, "invalid type: string \"3\""),
            (r#"{"method": "ngram", "num_speculative_tokens": -1}"#, "integer `-1`"),
            (r#"{"method": "ngram", "draft_model": "x"}"#, "unknown field `draft_model`"),
        ] {
            let error = parse_speculation(json).expect_err("refused").to_string();
            assert!(error.contains(what), "{json}: {error}");
        }
    }

    #[test]
    fn the_example_of_the_page_is_valid() {
        let page = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/reference/models.md");
        let page = std::fs::read_to_string(page).expect("docs/reference/models.md is there");
        let (_, rest) = page.split_once("baton engine --speculative-config '").expect("the example");
        let (json, _) = rest.split_once('\'').expect("its end");
        assert_eq!(parse_speculation(json).ok(), PromptLookup::new(5, 2, 4));
        for field in ["method", "num_speculative_tokens", "prompt_lookup_max", "prompt_lookup_min"] {
            assert!(page.contains(&format!("| `{field}` |")), "{field} is not in the table");
        }
    }
}
