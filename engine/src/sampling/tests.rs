//! Sampling compared with a slow version that sorts everything in f64, with golden distributions, and with itself.

use baton_openai::{Endpoint, ParseLimits};
use proptest::prelude::*;

use super::*;
use crate::model::generation::GenerationDefaults;
use crate::model::tests::fixture_files;

mod order;

const START: TokenPosition = TokenPosition { position: 0, generated: 0 };

fn sampled(logits: &[f32], params: &SamplingParams) -> Result<SampledToken, NoCandidate> {
    sample(logits, params, &TokenCounts::default(), START, &mut SamplingScratch::default())
}

fn random(temperature: f32) -> SamplingParams {
    SamplingParams { temperature, ..SamplingParams::default() }
}

/// Pseudo-random logits with a standard deviation of about 3.
fn row(entries: usize, seed: u64) -> Vec<f32> {
    let normal = |i: u64| (0..4).map(|k| uniform(seed, i * 4 + k) - 0.5).sum::<f64>() * 5.2;
    (0..entries as u64).map(|i| normal(i) as f32).collect()
}

/// The distribution by definition: everything sorted, in f64.
fn naive(row: &[f32], params: &SamplingParams) -> Vec<(u32, f64)> {
    let mut tokens: Vec<(u32, f64)> = row
        .iter()
        .enumerate()
        .filter(|(_, logit)| **logit > f32::NEG_INFINITY)
        .map(|(id, logit)| (id as u32, f64::from(*logit)))
        .collect();
    tokens.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    if params.top_k > 0 && tokens.len() > params.top_k as usize {
        let least = tokens[params.top_k as usize - 1].1;
        tokens.retain(|token| token.1 >= least);
    }
    let max = tokens[0].1;
    tokens.iter_mut().for_each(|token| token.1 = ((token.1 - max) / f64::from(params.temperature)).exp());
    tokens.retain(|token| token.1 >= f64::from(params.min_p));
    let total: f64 = tokens.iter().map(|token| token.1).sum();
    if params.top_p < 1.0 {
        let mut before = 0.0;
        tokens.retain(|token| {
            let keep = before < f64::from(params.top_p) * total;
            before += token.1;
            keep
        });
    }
    let total: f64 = tokens.iter().map(|token| token.1).sum();
    tokens.iter().map(|(id, weight)| (*id, weight / total)).filter(|(_, p)| *p > 1e-30).collect()
}

/// Compares the tokens of both, except those that rounding puts on either side of the top-p or min-p cut.
fn agree(row: &[f32], params: &SamplingParams) -> Result<(), String> {
    let ours = distribution(row, params, &TokenCounts::default(), START);
    let exact = naive(row, params);
    let sum: f64 = ours.iter().map(|(_, p)| p).sum();
    if (sum - 1.0).abs() > 1e-9 {
        return Err(format!("sums to {sum}"));
    }
    for (id, p) in &exact {
        let q = ours.iter().find(|(other, _)| other == id).map_or(0.0, |(_, q)| *q);
        let at_the_cut = q == 0.0 && exact.last().is_some_and(|(_, last)| *p <= last * (1.0 + 1e-5));
        if (p - q).abs() > 1e-5 * p + 1e-9 && !at_the_cut {
            return Err(format!("token {id}: {q}, exactly {p}"));
        }
    }
    Ok(())
}

fn any_row() -> impl Strategy<Value = Vec<f32>> {
    let logit = prop_oneof![
        8 => -12.0f32..12.0,
        2 => (-3i8..3).prop_map(f32::from),
        1 => Just(f32::NEG_INFINITY),
        1 => Just(f32::NAN),
    ];
    prop::collection::vec(logit, 1..400).prop_filter("a candidate", |row| row.iter().any(|x| x.is_finite()))
}

fn any_params() -> impl Strategy<Value = SamplingParams> {
    let top_k = prop_oneof![Just(0u32), 1u32..8, 1u32..500];
    let top_p = prop_oneof![Just(1.0f32), 0.01f32..1.0];
    let min_p = prop_oneof![Just(0.0f32), 0.001f32..0.9];
    (0.1f32..3.0, top_k, top_p, min_p, any::<u64>()).prop_map(|(temperature, top_k, top_p, min_p, seed)| {
        SamplingParams { temperature, top_k, top_p, min_p, seed, ..SamplingParams::default() }
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn any_row_with_any_parameters_has_the_distribution_of_the_slow_version(row in any_row(), params in any_params()) {
        prop_assert_eq!(agree(&row, &params), Ok(()));
    }

    #[test]
    fn a_drawn_token_has_a_probability_and_draws_are_independent(
        rows in prop::collection::vec((any_row(), any_params()), 1..4),
        position: u64,
    ) {
        let mut used = SamplingScratch::default();
        for (row, params) in &rows {
            let place = TokenPosition { position, generated: 0 };
            let counts = TokenCounts::default();
            let token = sample(row, params, &counts, place, &mut used).expect("a candidate");
            prop_assert_eq!(&token, &sample(row, params, &counts, place, &mut SamplingScratch::default()).expect("a candidate"));
            let mut possible = distribution(row, params, &counts, place).into_iter();
            prop_assert!(possible.any(|(id, p)| id == token.token && p > 0.0));
        }
    }

    #[test]
    fn no_row_at_all_panics(
        row in prop::collection::vec(prop_oneof![any::<f32>(), Just(f32::INFINITY)], 0..200),
        params in any_params(),
        penalty in 0.01f32..50.0,
        logprobs in prop::option::of(0u32..20),
        bias in prop::collection::vec((0u32..300, -100f32..100.0), 0..3),
    ) {
        let params = SamplingParams { repetition_penalty: penalty, logprobs, logit_bias: bias, ..params };
        let counts = TokenCounts::new(&[0, 5, 1_000_000]);
        if let Ok(token) = sample(&row, &params, &counts, START, &mut SamplingScratch::default()) {
            prop_assert!((token.token as usize) < row.len());
            prop_assert!(!row[token.token as usize].is_nan());
        }
    }
}

#[test]
fn large_vocabularies_agree_too_through_every_path() {
    let peaked = row(20_000, 7);
    let flat = vec![1.0; 20_000];
    let gentle: Vec<f32> = peaked.iter().map(|x| x * 0.01).collect();
    for row in [&peaked, &flat, &gentle] {
        for (top_k, top_p, min_p) in
            [(0, 0.9, 0.0), (0, 0.999, 0.0), (0, 0.5, 0.1), (50, 1.0, 0.0), (5000, 0.7, 0.0), (0, 1.0, 0.2)]
        {
            let params = SamplingParams { top_k, top_p, min_p, ..random(0.8) };
            assert_eq!(agree(row, &params), Ok(()), "top_k {top_k} top_p {top_p} min_p {min_p}");
        }
    }
}

#[test]
fn greedy_takes_the_lowest_id_among_equals_and_never_nan() {
    let mut logits = vec![0.0; 300];
    (logits[70], logits[200], logits[10]) = (5.0, 5.0, f32::NAN);
    assert_eq!(sampled(&logits, &SamplingParams::default()).expect("a candidate").token, 70);
    assert_eq!(sampled(&logits, &random(1e-6)).expect("a candidate").token, 70);
    logits[250] = f32::INFINITY;
    assert_eq!(sampled(&logits, &random(1.0)).expect("a candidate").token, 250);
}

#[test]
fn a_row_without_a_candidate_is_an_error() {
    for logits in [vec![], vec![f32::NAN; 100], vec![f32::NEG_INFINITY; 3]] {
        let error = NoCandidate { entries: logits.len() };
        assert_eq!(sampled(&logits, &random(1.0)), Err(error));
        assert_eq!(sampled(&logits, &SamplingParams::default()), Err(error));
    }
}

#[test]
fn draws_at_consecutive_positions_follow_the_distribution() {
    let logits = [2.0, 1.0, 0.0, -1.0, f32::NEG_INFINITY, 1.0];
    let params = SamplingParams { seed: 42, ..random(0.9) };
    let draws = 100_000;
    let mut counts = [0u32; 6];
    let mut scratch = SamplingScratch::default();
    for position in 0..draws {
        let place = TokenPosition { position, generated: 0 };
        let token =
            sample(&logits, &params, &TokenCounts::default(), place, &mut scratch).expect("a candidate");
        counts[token.token as usize] += 1;
    }
    let expected = distribution(&logits, &params, &TokenCounts::default(), START);
    let square = |(id, p): &(u32, f64)| {
        let expected = p * draws as f64;
        (f64::from(counts[*id as usize]) - expected).powi(2) / expected
    };
    let chi2: f64 = expected.iter().map(square).sum();
    // Four degrees of freedom: above 23.5 once in 10 000 seeds. The seed is fixed.
    assert!(chi2 < 23.5 && counts[4] == 0, "chi² {chi2}, {counts:?}");
}

#[test]
fn seeds_and_choices_draw_independently() {
    let logits = vec![0.0; 1000];
    let draws = |params: &SamplingParams| -> Vec<u32> {
        let place = |position| TokenPosition { position, generated: 0 };
        let draw = |position| {
            let counts = TokenCounts::default();
            sample(&logits, params, &counts, place(position), &mut SamplingScratch::default())
                .expect("a candidate")
                .token
        };
        (0..64).map(draw).collect()
    };
    let params = SamplingParams { seed: 1, ..random(1.0) };
    let lists: Vec<Vec<u32>> = (0..4).map(|index| draws(&params.clone().for_choice(index))).collect();
    assert_eq!(lists[0], draws(&params));
    for (i, a) in lists.iter().enumerate() {
        for b in &lists[..i] {
            assert!(a.iter().zip(b).filter(|(a, b)| a == b).count() < 4);
        }
    }
}

#[test]
fn eos_and_stop_tokens_wait_for_min_tokens() {
    let logits = [9.0, 8.0, 1.0];
    let exclusions =
        TokenExclusions { min_tokens: 2, before_min: vec![0, 1, 99], ..TokenExclusions::default() };
    let params = SamplingParams { exclusions, ..SamplingParams::default() };
    let token = |generated| {
        let place = TokenPosition { position: 5, generated };
        sample(&logits, &params, &TokenCounts::default(), place, &mut SamplingScratch::default())
            .expect("a candidate")
            .token
    };
    assert_eq!([token(0), token(1), token(2)], [2, 2, 0]);
}

#[test]
fn bias_and_penalties_move_logits_as_documented() {
    let params = SamplingParams {
        repetition_penalty: 2.0,
        frequency_penalty: 0.5,
        presence_penalty: 0.25,
        logit_bias: vec![(3, 10.0), (77, 1.0)],
        ..SamplingParams::default()
    };
    let mut counts = TokenCounts::new(&[0, 1]);
    [1, 2, 2].iter().for_each(|id| counts.push(*id));
    let mut adjusted = Vec::new();
    let row =
        SamplingRow { params: &params, counts: &counts, output: &[1, 2, 2], position: START, mask: None };
    let row = adjust(&[4.0, -1.0, 6.0, 1.0], &row, &mut adjusted);
    assert_eq!(row, [2.0, -2.0 - 0.75, 3.0 - 1.25, 11.0]);
}

#[test]
fn logprobs_are_of_the_models_own_distribution() {
    let logits = row(5000, 3);
    let total: f64 = logits.iter().map(|x| f64::from(*x).exp()).sum();
    let params = SamplingParams { logprobs: Some(5), top_k: 3, logit_bias: vec![(9, 100.0)], ..random(0.3) };
    let sampled = sampled(&logits, &params).expect("a candidate");
    let own = sampled.logprobs.expect("asked for");
    assert_eq!(sampled.token, 9);
    assert!((f64::from(own.logprob) - (f64::from(logits[9]) - total.ln())).abs() < 1e-5);
    assert_eq!(own.rank as usize, 1 + logits.iter().filter(|x| **x > logits[9]).count());
    let mut sorted: Vec<u32> = (0..5000).collect();
    sorted.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]));
    assert_eq!(own.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), sorted[..5]);
    for (id, logprob) in own.top {
        assert!((f64::from(logprob) - (f64::from(logits[id as usize]) - total.ln())).abs() < 1e-5);
    }
}

#[test]
fn logprobs_of_ties_and_of_a_broken_row_are_defined() {
    let mut scratch = SamplingScratch::default();
    let ties = logprobs_of(&[1.0; 8], 5, 3, &mut scratch);
    assert_eq!((ties.rank, ties.top.iter().map(|top| top.0).collect()), (1, vec![0, 1, 2]));
    assert!((ties.logprob - (1.0f32 / 8.0).ln()).abs() < 1e-6);
    let nothing = logprobs_of(&[f32::NAN; 8], 5, 3, &mut scratch);
    assert_eq!((nothing.logprob, nothing.top), (f32::NEG_INFINITY, Vec::new()));
    assert_eq!(logprobs_of(&[1.0, 0.0], 9, 0, &mut scratch).logprob, f32::NEG_INFINITY);
}

#[test]
fn a_request_wins_over_the_model_and_the_model_over_openai() {
    let defaults = GenerationDefaults::load(&fixture_files("qwen3")).expect("readable");
    assert_eq!((defaults.temperature, defaults.top_p, defaults.top_k), (Some(0.6), Some(0.9), Some(20)));
    assert_eq!(defaults.eos_token_ids.len(), 2);
    let resolve = |body: &str, defaults: &GenerationDefaults| {
        let body = format!("{{\"prompt\":\"x\"{body}}}");
        let request = baton_openai::parse(Endpoint::Completions, body.as_bytes(), &ParseLimits::default());
        SamplingParams::resolve(&request.expect("a sound request"), defaults, &[7], 5)
    };
    let mine = resolve(r#","temperature":0,"top_k":-1,"seed":-3,"stop_token_ids":[9]"#, &defaults);
    assert_eq!((mine.temperature, mine.top_k, mine.top_p, mine.seed), (0.0, 0, 0.9, -3i64 as u64));
    assert_eq!(mine.exclusions.before_min, [7, 9]);
    assert_eq!(resolve(r#","ignore_eos":true"#, &defaults).exclusions.before_min, [7], "as in vLLM");
    let plain = resolve("", &GenerationDefaults::default());
    assert_eq!((plain.temperature, plain.top_k, plain.top_p, plain.seed), (1.0, 0, 1.0, 5));
    assert_eq!(
        GenerationDefaults::load(&fixture_files("sentencepiece")).expect("no file"),
        GenerationDefaults::default()
    );
}

/// `cargo test --release -p baton-engine sampling_costs -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, not a check"]
fn sampling_costs() {
    let broad = row(152_064, 1);
    let flat: Vec<f32> = broad.iter().map(|x| x * 0.05).collect();
    // As in most models: some tens of tokens have nearly all of the mass.
    let mut peaked = broad.clone();
    peaked.iter_mut().step_by(3000).for_each(|x| *x = x.abs() + 10.0);
    let mut scratch = SamplingScratch::default();
    let cases = [
        ("greedy", SamplingParams::default()),
        ("greedy, 5 logprobs", SamplingParams { logprobs: Some(5), ..SamplingParams::default() }),
        ("temperature", random(0.8)),
        ("top_k 20", SamplingParams { top_k: 20, ..random(0.8) }),
        ("top_k 20, top_p 0.9", SamplingParams { top_k: 20, top_p: 0.9, ..random(0.6) }),
        ("top_p 0.9", SamplingParams { top_p: 0.9, ..random(0.8) }),
        ("min_p 0.1", SamplingParams { min_p: 0.1, ..random(0.8) }),
        ("penalty, top_p 0.9", SamplingParams { repetition_penalty: 1.1, top_p: 0.9, ..random(0.8) }),
    ];
    let prompt: Vec<u32> = (0..1000).map(|i| i * 31).collect();
    for (logits, kind) in [(&peaked, "peaked"), (&broad, "broad"), (&flat, "flat")] {
        for (name, params) in &cases {
            let counts = TokenCounts::for_params(params, &prompt);
            let mut best = std::time::Duration::MAX;
            for position in 0..100 {
                let start = std::time::Instant::now();
                let place = TokenPosition { position, generated: 0 };
                std::hint::black_box(sample(logits, params, &counts, place, &mut scratch))
                    .expect("a candidate");
                best = best.min(start.elapsed());
            }
            println!("152064 {kind:6} {name:22} {:7.1} us", best.as_secs_f64() * 1e6);
        }
    }
}
