//! The log-probabilities of a prompt, in the forms of a reply: for `prompt_logprobs`, and for `echo` with `logprobs`.

use baton_openai::{PromptTokenLogprob, TokenLogprob};

use crate::model::tokenizer::Tokenizer;
use crate::sampling::SampledLogprobs;
use crate::server::choice::token_logprob;

/// Each token of a prompt with its log-probabilities; `None` for the first token. `scores` are those of the second token,
/// the third, and so on.
fn scored<'a>(
    prompt: &'a [u32],
    scores: &'a [SampledLogprobs],
) -> impl Iterator<Item = (u32, Option<&'a SampledLogprobs>)> {
    let scores = std::iter::once(None).chain(scores.iter().map(Some)).chain(std::iter::repeat(None));
    prompt.iter().copied().zip(scores)
}

/// `prompt_logprobs` of a choice, with `top` alternatives. The token itself comes first, as in vLLM.
pub(super) fn prompt_logprobs(
    tokenizer: &Tokenizer,
    prompt: &[u32],
    scores: &[SampledLogprobs],
    top: u32,
) -> Vec<Vec<PromptTokenLogprob>> {
    let entry = |id: u32, logprob: f32, rank: u32| PromptTokenLogprob {
        id,
        token: tokenizer.text(id).into_owned(),
        logprob,
        rank,
    };
    let position = |(token, score): (u32, Option<&SampledLogprobs>)| {
        let Some(score) = score else { return Vec::new() };
        let own = entry(token, score.logprob, score.rank);
        let ranked = score.top.iter().zip(1..).take(top as usize);
        let others = ranked.filter(|((id, _), _)| *id != token);
        std::iter::once(own).chain(others.map(|((id, logprob), rank)| entry(*id, *logprob, rank))).collect()
    };
    scored(prompt, scores).map(position).collect()
}

/// The tokens of an echoed prompt, with `top` alternatives.
pub(super) fn echoed_tokens(
    tokenizer: &Tokenizer,
    prompt: &[u32],
    scores: &[SampledLogprobs],
    top: u32,
) -> Vec<TokenLogprob> {
    scored(prompt, scores)
        .map(|(token, score)| token_logprob(tokenizer, token, score, top as usize))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::tests::fixture;

    #[test]
    fn a_token_comes_first_once_and_the_first_token_has_no_value() {
        let (tokenizer, _) = fixture("qwen3");
        let score = |logprob, rank, top: &[(u32, f32)]| SampledLogprobs { logprob, rank, top: top.to_vec() };
        let scores = [
            score(-2.0, 3, &[(40, -0.5), (41, -1.5), (42, -3.0)]),
            score(-0.25, 1, &[(38, -0.25), (40, -2.0), (41, -4.0)]),
        ];
        let found = prompt_logprobs(&tokenizer, &[36, 37, 38], &scores, 2);
        let short = |position: &[PromptTokenLogprob]| -> Vec<(u32, f32, u32)> {
            position.iter().map(|entry| (entry.id, entry.logprob, entry.rank)).collect()
        };
        let wanted =
            [vec![], vec![(37, -2.0, 3), (40, -0.5, 1), (41, -1.5, 2)], vec![(38, -0.25, 1), (40, -2.0, 2)]];
        assert_eq!(found.iter().map(|position| short(position)).collect::<Vec<_>>(), wanted);
        let echoed = echoed_tokens(&tokenizer, &[36, 37, 38], &scores, 1);
        assert_eq!(
            echoed.iter().map(|token| (token.logprob, token.top.len())).collect::<Vec<_>>(),
            [(None, 0), (Some(-2.0), 1), (Some(-0.25), 1)]
        );
    }
}
