//! Checks which tokens of a step are chosen on the device, and that the host would choose the same.

use super::*;
use baton_engine::sampling::{
    DrawSeries, SamplingRow, SamplingScratch, TokenCounts, TokenExclusions, TokenMask, distribution,
};

fn largest_difference(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).fold(0.0, |far, (a, b)| if (a - b).abs() <= far { far } else { (a - b).abs() })
}

fn best(row: &[f32]) -> u32 {
    let place = TokenPosition { position: 0, generated: 0 };
    distribution(row, &SamplingParams::default(), &TokenCounts::default(), place)[0].0
}

#[test]
fn device_draws_follow_the_hosts_distribution() {
    let config = config("Llama", "");
    let (mut device, mut cpu) = (on_software(&config, |_| ()), on_cpu(&config));
    let (prompt, table) = (tokens(7, 20), blocks(3, 3));
    let greedy = SamplingParams::default();
    let warm = SamplingParams { temperature: 0.7, seed: 3, ..greedy.clone() };
    let all = [
        greedy.clone(),
        warm.clone(),
        SamplingParams { top_k: 4, ..warm.clone() },
        SamplingParams { top_p: 0.6, ..warm.clone() },
        SamplingParams { min_p: 0.3, ..warm.clone() },
        SamplingParams { top_k: 20, top_p: 0.8, min_p: 0.05, ..warm },
    ];
    let mut logits = Logits::default();
    cpu.execute(&[step(&prompt, 0, &table)], &mut logits).unwrap();
    let row = logits.row(0).to_vec();
    for params in &all {
        let counts = TokenCounts::for_params(params, &prompt);
        let expected = distribution(&row, params, &counts, TokenPosition { position: 20, generated: 0 });
        let mut seen = vec![0_u32; VOCAB as usize];
        let rounds = 600;
        let mut start = 0;
        for round in 0..rounds {
            // A new seed in each round. The last token is recomputed every time.
            let params = SamplingParams { seed: round, ..params.clone() };
            let draw = Draw::of(&params, TokenPosition { position: 20, generated: 0 }).unwrap();
            let drawn =
                SeqStep { logits: LogitsRequest::Draw(draw), ..step(&prompt[start..], start, &table) };
            device.execute(&[drawn], &mut logits).unwrap();
            assert!(logits.values.is_empty());
            seen[logits.drawn(0).flatten().expect("a drawn token") as usize] += 1;
            start = 19;
        }
        for (token, count) in seen.iter().enumerate() {
            let wanted = expected.iter().find(|(id, _)| *id as usize == token).map_or(0.0, |(_, p)| *p);
            let share = f64::from(*count) / rounds as f64;
            // Four standard deviations of the share.
            let slack = 4.0 * (wanted * (1.0 - wanted) / rounds as f64).sqrt() + 1e-9;
            assert!((share - wanted).abs() <= slack, "{params:?}: token {token} {share} instead of {wanted}");
        }
    }
}

#[test]
fn rows_sampled_on_the_host_leave_other_rows_on_the_device() {
    let config = config("Qwen3", "");
    let (mut device, mut cpu) = (on_software(&config, |_| ()), on_cpu(&config));
    let prompts = [7, 2, 5, 1, 9, 4].map(|seed| tokens(seed, 21));
    let tables = [3, 9, 15, 21, 27, 33].map(|first| blocks(first, 3));
    let greedy = SamplingParams::default();
    // Parameters of requests that can share a step. Log-probabilities, a repetition penalty (Qwen2.5-Instruct sets one
    // for every request), a bias and excluded tokens need the host.
    let allowed = Some(Arc::new(TokenMask::of(&[3, 5, 9], VOCAB as usize)));
    let all = [
        greedy.clone(),
        SamplingParams { repetition_penalty: 1.05, ..greedy.clone() },
        SamplingParams { logprobs: Some(2), ..greedy.clone() },
        SamplingParams { temperature: 0.7, top_k: 1, ..greedy.clone() },
        SamplingParams { logit_bias: vec![(3, 1.0)], ..greedy.clone() },
        SamplingParams { exclusions: TokenExclusions { allowed, ..TokenExclusions::default() }, ..greedy },
    ];
    let (mut ours, mut theirs) = (Logits::default(), Logits::default());
    // First the prompts, then the decode step after them three times: directly, recorded, and launched as a graph.
    for (start, end) in [(0, 20), (20, 21), (20, 21), (20, 21)] {
        let place = TokenPosition { position: end as u64, generated: 0 };
        let batch = |drawn| -> Vec<SeqStep<'_>> {
            let logits = |at: usize| match Draw::of(&all[at], place) {
                Some(draw) if drawn => LogitsRequest::Draw(draw),
                Some(_) | None => LogitsRequest::Last,
            };
            let one = |at: usize| SeqStep {
                logits: logits(at),
                ..step(&prompts[at][start..end], start, &tables[at])
            };
            (0..prompts.len()).map(one).collect()
        };
        let copies = device.device().copies;
        device.execute(&batch(true), &mut ours).unwrap();
        // The step's integers; the tokens; rows 1 and 2; rows 4 and 5.
        assert_eq!(device.device().copies - copies, 4);
        cpu.execute(&batch(false), &mut theirs).unwrap();
        assert_eq!((ours.chosen.len(), ours.rows()), (6, 4));
        for at in [0, 3] {
            assert_eq!(ours.drawn(at), Some(Some(best(theirs.row(at)))), "row {at} from {start}");
        }
        for at in [1, 2, 4, 5] {
            let far = largest_difference(ours.row(at), theirs.row(at));
            assert!(ours.drawn(at).is_none() && far < FAR, "row {at} from {start}: {far}");
            let counts = TokenCounts::for_params(&all[at], &prompts[at][..end]);
            let row =
                SamplingRow { params: &all[at], counts: &counts, output: &[], position: place, mask: None };
            let [ours, theirs] = [&ours, &theirs].map(|logits| {
                row.sample(logits.row(at), &mut SamplingScratch::default()).expect("a candidate").token
            });
            assert_eq!(ours, theirs, "row {at} from {start}");
        }
    }
    assert!(device.device().replays >= 2, "{}", device.device().replays);
}

#[test]
fn rows_copied_in_pieces_keep_their_order() {
    let config = config("Llama", "");
    let change = |options: &mut DeviceOptions| options.max_sequences = 4;
    let (mut device, mut cpu) = (on_software(&config, change), on_cpu(&config));
    let (whole, one, tables) = (tokens(7, 11), tokens(2, 9), [blocks(3, 2), blocks(9, 2), blocks(15, 2)]);
    let draw = Draw::of(&SamplingParams::default(), TokenPosition { position: 9, generated: 0 }).unwrap();
    // Pieces of four rows: 0 is drawn, 1 to 11 are values, 12 is drawn.
    let batch = |draw| {
        [(&one, draw), (&whole, LogitsRequest::All), (&one, draw)]
            .into_iter()
            .zip(&tables)
            .map(|((tokens, logits), table)| SeqStep { logits, ..step(tokens, 0, table) })
            .collect::<Vec<_>>()
    };
    let (mut ours, mut theirs) = (Logits::default(), Logits::default());
    device.execute(&batch(LogitsRequest::Draw(draw)), &mut ours).unwrap();
    cpu.execute(&batch(LogitsRequest::Last), &mut theirs).unwrap();
    assert_eq!((ours.chosen.len(), ours.rows(), theirs.rows()), (13, 11, 13));
    for at in 0..13 {
        match ours.drawn(at) {
            Some(token) => {
                assert!([0, 12].contains(&at) && token == Some(best(theirs.row(at))), "row {at}");
            }
            None => assert!(largest_difference(ours.row(at), theirs.row(at)) < FAR, "row {at}"),
        }
    }
}

#[test]
fn each_row_of_a_draft_is_drawn_at_its_own_position() {
    let config = config("Llama", "");
    let mut device = on_software(&config, |_| ());
    let (all, table) = (tokens(7, 24), blocks(3, 4));
    let part = |start: usize, end: usize, logits| SeqStep { logits, ..step(&all[start..end], start, &table) };
    let greedy = SamplingParams::default();
    for params in [SamplingParams { temperature: 0.9, seed: 5, ..greedy.clone() }, greedy] {
        let place = |offset: usize| TokenPosition { position: 21 + offset as u64, generated: offset as u32 };
        let draws = DrawSeries::of(&params, place(0)).unwrap();
        let (mut together, mut alone) = (Logits::default(), Logits::default());
        device.execute(&[part(0, 20, LogitsRequest::No)], &mut together).unwrap();
        device.execute(&[part(20, 24, LogitsRequest::DrawEach(draws))], &mut together).unwrap();
        assert!(together.values.is_empty() && together.chosen.len() == 4);
        for offset in 0..4 {
            let draw = Draw::of(&params, place(offset)).unwrap();
            assert_eq!(draws.at(offset), draw);
            let one = part(20 + offset, 21 + offset, LogitsRequest::Draw(draw));
            device.execute(&[one], &mut alone).unwrap();
            assert_eq!(together.drawn(offset), alone.drawn(0), "{offset}");
        }
    }
}
