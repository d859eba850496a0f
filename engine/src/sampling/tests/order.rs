//! The order of vLLM's sampler (`vllm/v1/sample/sampler.py` of 0.32), written down step by step in f64, beside ours.

use std::collections::HashSet;
use std::sync::Arc;

use super::*;

/// A row of logits with all that changes it.
#[derive(Debug)]
struct OrderCase {
    logits: Vec<f32>,
    params: SamplingParams,
    prompt: Vec<u32>,
    output: Vec<u32>,
    mask: Option<TokenMask>,
}

impl OrderCase {
    fn counts(&self) -> TokenCounts {
        let mut counts = TokenCounts::new(&self.prompt);
        self.output.iter().for_each(|id| counts.push(*id));
        counts
    }

    fn position(&self) -> TokenPosition {
        let position = (self.prompt.len() + self.output.len()) as u64;
        TokenPosition { position, generated: self.output.len() as u32 }
    }

    /// Steps 3 to 6 of vLLM's sampler, after the grammar's mask.
    fn processed(&self) -> Vec<f64> {
        let mut row: Vec<f64> = self.logits.iter().map(|logit| f64::from(*logit)).collect();
        let exclude = |row: &mut Vec<f64>, excluded: &dyn Fn(u32) -> bool| {
            for (id, logit) in row.iter_mut().enumerate() {
                *logit = if excluded(id as u32) { f64::NEG_INFINITY } else { *logit };
            }
        };
        let exclusions = &self.params.exclusions;
        for set in self.mask.iter().chain(exclusions.allowed.as_deref()) {
            exclude(&mut row, &|id| !set.permits(id));
        }
        for word in exclusions.bad_words.iter() {
            let (last, before) = word.split_last().expect("not empty");
            if self.output.len() >= before.len() && self.output[self.output.len() - before.len()..] == *before
            {
                exclude(&mut row, &|id| id == *last);
            }
        }
        if self.output.len() < exclusions.min_tokens as usize {
            exclude(&mut row, &|id| exclusions.before_min.contains(&id));
        }
        for (id, bias) in &self.params.logit_bias {
            row[*id as usize] += f64::from(*bias);
        }
        let seen: HashSet<u32> = self.prompt.iter().chain(&self.output).copied().collect();
        for (id, logit) in row.iter_mut().enumerate() {
            let (id, penalty) = (id as u32, f64::from(self.params.repetition_penalty));
            if seen.contains(&id) {
                *logit = if *logit > 0.0 { *logit / penalty } else { *logit * penalty };
            }
            let count = self.output.iter().filter(|other| **other == id).count() as f64;
            if count > 0.0 {
                *logit -= f64::from(self.params.frequency_penalty) * count;
                *logit -= f64::from(self.params.presence_penalty);
            }
        }
        row
    }
}

const VOCAB: u32 = 12;

fn any_case() -> impl Strategy<Value = OrderCase> {
    let ids = |most: usize| prop::collection::vec(0..VOCAB, 0..most);
    let words = prop::collection::vec(prop::collection::vec(0..3u32, 1..4), 0..4);
    let exclusions = (prop::option::of(ids(9)), words, 0..4u32, ids(3)).prop_map(
        |(allowed, bad_words, min_tokens, before_min)| TokenExclusions {
            allowed: allowed.map(|ids| Arc::new(TokenMask::of(&ids, VOCAB as usize))),
            bad_words: Arc::new(bad_words),
            min_tokens,
            before_min,
        },
    );
    let penalties = (0.5f32..2.0, -2.0f32..2.0, -2.0f32..2.0);
    let bias = prop::collection::hash_map(0..VOCAB, -20.0f32..20.0, 0..3);
    let params = (exclusions, penalties, bias).prop_map(|(exclusions, penalties, bias)| SamplingParams {
        exclusions,
        repetition_penalty: penalties.0,
        frequency_penalty: penalties.1,
        presence_penalty: penalties.2,
        logit_bias: bias.into_iter().collect(),
        ..SamplingParams::default()
    });
    let logits = prop::collection::vec(-8.0f32..8.0, VOCAB as usize);
    // Few different tokens, so that bad words begin often.
    let output = prop::collection::vec(0..3u32, 0..6);
    let mask = prop::option::weighted(0.3, ids(9).prop_map(|ids| TokenMask::of(&ids, VOCAB as usize)));
    (logits, params, ids(4), output, mask).prop_map(|(logits, params, prompt, output, mask)| OrderCase {
        logits,
        params,
        prompt,
        output,
        mask,
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(3000))]

    #[test]
    fn masks_then_bias_then_penalties_as_in_vllms_sampler(case in any_case()) {
        let (counts, position) = (case.counts(), case.position());
        let OrderCase { params, output, .. } = &case;
        let row = SamplingRow { params, counts: &counts, output, position, mask: case.mask.as_ref() };
        let mut adjusted = Vec::new();
        let ours = adjust(&case.logits, &row, &mut adjusted);
        let theirs = case.processed();
        for (id, (ours, theirs)) in ours.iter().zip(&theirs).enumerate() {
            let same = f64::from(*ours) == *theirs || (f64::from(*ours) - theirs).abs() < 1e-4;
            prop_assert!(same, "token {}: {} instead of {}", id, ours, theirs);
        }
        let best = theirs.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        match row.sample(&case.logits, &mut SamplingScratch::default()) {
            Ok(sampled) if best > f64::NEG_INFINITY => {
                prop_assert!(theirs[sampled.token as usize] > best - 1e-4);
            }
            // `min_tokens` has yielded to the mask.
            Ok(sampled) => {
                let early = position.generated < params.exclusions.min_tokens;
                prop_assert!(early && case.mask.as_ref().is_some_and(|mask| mask.permits(sampled.token)));
            }
            Err(NoCandidate { .. }) => prop_assert!(best == f64::NEG_INFINITY && has_candidate(&case.logits)),
        }
    }
}

#[test]
fn min_tokens_yields_to_a_mask_that_permits_only_the_end() {
    let exclusions = TokenExclusions { min_tokens: 9, before_min: vec![7], ..TokenExclusions::default() };
    let params = SamplingParams { exclusions, ..SamplingParams::default() };
    let (logits, counts) = (row(40, 1), TokenCounts::default());
    let position = TokenPosition { position: 12, generated: 2 };
    let token = |permitted: &[u32]| {
        let mask = TokenMask::of(permitted, 40);
        let row =
            SamplingRow { params: &params, counts: &counts, output: &[1, 1], position, mask: Some(&mask) };
        row.sample(&logits, &mut SamplingScratch::default()).map(|sampled| sampled.token)
    };
    assert_eq!(token(&[7]), Ok(7));
    assert_eq!(token(&[7, 1]), Ok(1));
    assert_eq!(token(&[]), Err(NoCandidate { entries: 40 }));
}

#[test]
fn min_p_counts_from_the_best_token_then_top_k_keeps_ties_then_top_p_is_a_share_of_the_rest() {
    let logit = |share: f32| share.ln();
    let logits = [logit(0.4), logit(0.2), logit(0.2), logit(0.1), logit(0.1)];
    let left = |params: SamplingParams| -> Vec<u32> {
        let params = SamplingParams { temperature: 1.0, ..params };
        distribution(&logits, &params, &TokenCounts::default(), START).iter().map(|(id, _)| *id).collect()
    };
    let off = SamplingParams::default;
    // 0.1 is less than 0.3 of 0.4.
    assert_eq!(left(SamplingParams { min_p: 0.3, ..off() }), [0, 1, 2]);
    // Tokens 1 and 2 are equal, and both are the second best.
    assert_eq!(left(SamplingParams { top_k: 2, ..off() }), [0, 1, 2]);
    // 0.55 of everything needs two tokens, 0.45 of the three that min-p or top-k leave is one.
    assert_eq!(left(SamplingParams { top_p: 0.55, ..off() }), [0, 1]);
    assert_eq!(left(SamplingParams { top_p: 0.45, ..off() }), [0, 1]);
    assert_eq!(left(SamplingParams { top_p: 0.45, min_p: 0.3, ..off() }), [0]);
    assert_eq!(left(SamplingParams { top_p: 0.45, top_k: 2, ..off() }), [0]);
}

#[test]
fn a_device_draws_only_rows_that_need_nothing_but_their_logits() {
    let (plain, counts) = (SamplingParams { seed: 3, ..random(0.5) }, TokenCounts::default());
    let mask = TokenMask::of(&[1], 8);
    let draw = |params: &SamplingParams, mask| {
        SamplingRow { params, counts: &counts, output: &[], position: START, mask }.draw()
    };
    assert_eq!(draw(&plain, None), Draw::of(&plain, START));
    assert!(draw(&plain, None).is_some() && draw(&plain, Some(&mask)).is_none());
    let allowed = Some(Arc::new(mask.clone()));
    for exclusions in [
        TokenExclusions { allowed, ..TokenExclusions::default() },
        TokenExclusions { bad_words: Arc::new(vec![vec![5]]), ..TokenExclusions::default() },
        TokenExclusions { min_tokens: 1, before_min: vec![2], ..TokenExclusions::default() },
    ] {
        assert_eq!(draw(&SamplingParams { exclusions, ..plain.clone() }, None), None);
    }
    for params in [
        SamplingParams { logprobs: Some(0), ..plain.clone() },
        SamplingParams { logit_bias: vec![(1, 1.0)], ..plain.clone() },
        SamplingParams { repetition_penalty: 1.1, ..plain.clone() },
    ] {
        assert_eq!(draw(&params, None), None);
    }
}
