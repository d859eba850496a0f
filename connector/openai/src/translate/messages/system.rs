//! Claude Code's billing line in `system`. It differs in each request, so a prefix hash or a prompt that contains it
//! never matches a cache. vLLM removes it before it applies its template (`entrypoints/anthropic/serving.py`, 0.32).

use std::borrow::Cow;

use memchr::memmem;
use serde_json::Value;

/// Beginning of the line.
const BILLING: &str = "x-anthropic-billing-header";
/// Maximum bytes of a `system` that is parsed to compare it. Claude Code's has tens of kilobytes.
const PARSED_BYTES_MAX: usize = 256 << 10;

/// A text of `system` without the line; `None` if nothing else is in it.
pub(super) fn without_billing(text: &str) -> Option<&str> {
    if !text.starts_with(BILLING) {
        return Some(text);
    }
    text.split_once('\n').map(|(_, rest)| rest).filter(|rest| !rest.trim().is_empty())
}

/// The bytes of a `system` field by which requests are compared: without the line, unless the field is very long.
#[must_use]
pub fn compared_bytes(system: &[u8]) -> Cow<'_, [u8]> {
    if system.len() > PARSED_BYTES_MAX || memmem::find(system, BILLING.as_bytes()).is_none() {
        return Cow::Borrowed(system);
    }
    let mut value: Value = serde_json::from_slice(system).unwrap_or_default();
    match &mut value {
        Value::String(text) => *text = without_billing(text).unwrap_or_default().to_owned(),
        Value::Array(blocks) => {
            blocks.retain_mut(|block| {
                let Some(text) = block["text"].as_str() else { return true };
                let Some(rest) = without_billing(text).map(str::to_owned) else { return false };
                block["text"] = rest.into();
                true
            });
        }
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::Object(_) => {}
    }
    Cow::Owned(value.to_string().into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_prompts_with_other_billing_lines_compare_equal() {
        let of = |number: u32| {
            let billing = format!("{BILLING}: cc_version=2.1; cch={number};");
            let block = |text: &str| serde_json::json!({"type": "text", "text": text});
            let blocks = serde_json::json!([block(&billing), block("You are Claude Code.")]).to_string();
            let text = serde_json::json!(format!("{billing}\nYou are Claude Code.")).to_string();
            [blocks, text].map(|system| compared_bytes(system.as_bytes()).into_owned())
        };
        assert_eq!(of(1), of(2));
        for compared in of(1) {
            let text = String::from_utf8(compared).expect("UTF-8");
            assert!(text.contains("You are Claude Code.") && !text.contains("cch"), "{text}");
        }
        let plain = br#""You are Claude Code.""#;
        assert!(matches!(compared_bytes(plain), Cow::Borrowed(same) if same == plain));
        let long = format!("\"{BILLING}{}\"", "x".repeat(PARSED_BYTES_MAX));
        assert!(matches!(compared_bytes(long.as_bytes()), Cow::Borrowed(_)), "bounded");
        assert_eq!(without_billing(BILLING), None);
        assert_eq!(
            without_billing("about x-anthropic-billing-header"),
            Some("about x-anthropic-billing-header")
        );
    }
}
