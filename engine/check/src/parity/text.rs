//! Tokenizer round trips, chat renderings and sampling distributions.

use std::sync::Arc;

use super::{CheckLine, ParityError, ParityModel};
use crate::golden_text::{GoldenTextCase, check_chat, check_sampling, check_tokenizer};
use baton_engine::model::chat_template::ChatTemplate;
use baton_engine::model::tokenizer::Tokenizer;

/// Encoding, decoding and streaming of golden texts; golden conversations rendered and encoded.
pub(super) fn text(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let tokenizer = Arc::new(Tokenizer::load(&subject.files)?);
    let template = ChatTemplate::load(&subject.files, &tokenizer)?;
    let golden = &subject.golden.json;
    let mut lines = summary("tokenizer round trips", check_tokenizer(golden, &tokenizer));
    lines.extend(summary("chat renderings", check_chat(golden, &tokenizer, &template)));
    Ok(lines)
}

/// Distributions after the warpers, for the prompts whose raw logits are in the golden file.
pub(super) fn sampling(subject: &ParityModel) -> Result<Vec<CheckLine>, ParityError> {
    let golden = &subject.golden;
    let cases = check_sampling(&golden.json, |prompt, step| {
        let rows = golden.tensor("f32", prompt, "steps")?;
        rows.get(step * subject.config.vocab..(step + 1) * subject.config.vocab).map(<[f32]>::to_vec)
    });
    Ok(summary("sampling distributions", cases))
}

/// One line for all passed cases, and one for each failed case. Empty if the golden file has no such cases.
fn summary(what: &str, cases: Vec<GoldenTextCase>) -> Vec<CheckLine> {
    let total = cases.len();
    let failed: Vec<_> =
        cases.into_iter().filter_map(|(name, result)| result.err().map(|why| (name, why))).collect();
    if total == 0 {
        return Vec::new();
    }
    let held = total - failed.len();
    let mut lines = vec![CheckLine::new(what, failed.is_empty(), format!("{held} of {total}"))];
    lines.extend(failed.into_iter().map(|(name, why)| CheckLine::new(&name, false, why)));
    lines
}
