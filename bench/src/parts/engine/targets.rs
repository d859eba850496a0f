//! Targets of the CPU engine and whether they were met: those of the README's speed table that one process can
//! check. `bench/engine_peers.py` compares with other engines and oneDNN.

use std::io::Write;

use baton_engine::model::config::ModelConfig;
use baton_engine::model::weights::parameter_count;
use serde::Serialize;

use super::{EngineReport, EngineSpeeds};

/// Decode of one sequence, over the limit of the readings right before and after it.
const DECODE_RATIO: f64 = 0.85;
/// Decode of eight sequences, tokens/s, if the limit allows it.
const DECODE_B8_TPS: f64 = 300.0;
/// From starting the program to the first token, milliseconds.
const FIRST_TOKEN_MS: f64 = 2_000.0;
/// Resident memory over weights and KV pool.
const MEMORY_RATIO: f64 = 1.15;
/// Targets of speeds and times hold for 214 million parameters. A larger model is judged by ratios alone.
const PARAMETERS_MAX: usize = 220_000_000;

/// One target.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct SpeedTarget {
    /// The quantity.
    pub what: String,
    /// The measured value.
    pub reached: f64,
    /// The minimum. Absent if the target is a maximum.
    pub at_least: Option<f64>,
    /// The maximum.
    pub at_most: Option<f64>,
    /// Whether the target was met.
    pub met: bool,
}

impl SpeedTarget {
    fn at_least(what: String, reached: f64, least: f64) -> Self {
        Self { what, reached, at_least: Some(least), at_most: None, met: reached >= least }
    }

    fn at_most(what: &str, reached: f64, most: f64) -> Self {
        Self { what: what.to_owned(), reached, at_least: None, at_most: Some(most), met: reached <= most }
    }
}

/// The targets of all measurements.
pub(super) fn judge(report: &EngineReport, config: &ModelConfig) -> Vec<SpeedTarget> {
    let small = parameter_count(config) <= PARAMETERS_MAX;
    let mut targets = Vec::new();
    for row in &report.engines {
        let name = name(row);
        let what = format!("{name}: decode of 1 sequence over its limit");
        targets.push(SpeedTarget::at_least(what, row.decode_b1_ratio_beside, DECODE_RATIO));
        if small && row.decode_b8_limit_tps >= DECODE_B8_TPS {
            let what = format!("{name}: decode of 8 sequences, tokens/s");
            targets.push(SpeedTarget::at_least(what, row.decode_b8_tps.best, DECODE_B8_TPS));
        }
    }
    if let Some(process) = &report.process {
        if small {
            let (what, slowest) = ("from the start to the first token, ms", process.first_token_ms.best);
            targets.push(SpeedTarget::at_most(what, slowest, FIRST_TOKEN_MS));
        }
        let what = "resident memory over weights and KV pool";
        targets.push(SpeedTarget::at_most(what, process.memory_ratio, MEMORY_RATIO));
    }
    targets
}

fn name(row: &EngineSpeeds) -> String {
    format!("{} weights, products in {}, {} KV cache", row.weights, row.products, row.kv_cache)
}

pub(super) fn print(targets: &[SpeedTarget], out: &mut dyn Write) -> std::io::Result<()> {
    let met = targets.iter().filter(|target| target.met).count();
    writeln!(out, "\ntargets: {met} of {} met", targets.len())?;
    targets.iter().filter(|target| !target.met).try_for_each(|target| writeln!(out, "  MISSED {target}"))
}

impl std::fmt::Display for SpeedTarget {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Three digits for ratios, none for speeds and times.
        let digits = |value: f64| if value < 10.0 { 3 } else { 0 };
        let (sign, bound) = match (self.at_least, self.at_most) {
            (Some(least), _) => ("at least", least),
            (None, most) => ("at most", most.unwrap_or_default()),
        };
        let (what, reached) = (&self.what, self.reached);
        write!(f, "{what}: {:.*}, {sign} {:.*}", digits(reached), reached, digits(bound), bound)
    }
}

#[cfg(test)]
mod tests {
    use super::super::{BestWorst, MADE_UP_CONFIG, ProcessReport, sample};
    use super::*;
    use baton_engine::model::generation::GenerationDefaults;

    fn missed(report: &EngineReport, config: &ModelConfig) -> Vec<String> {
        judge(report, config).iter().filter(|target| !target.met).map(SpeedTarget::to_string).collect()
    }

    #[test]
    fn missed_targets_are_reported_and_small_model_targets_are_skipped_for_larger_models() {
        let config = ModelConfig::parse(MADE_UP_CONFIG.as_bytes(), GenerationDefaults::default()).unwrap();
        let mut report = sample(&config);
        let row = &mut report.engines[0];
        (row.decode_b1_ratio_beside, row.decode_b8_limit_tps) = (0.86, 400.0);
        row.decode_b8_tps = BestWorst { best: 301.0, worst: 200.0 };
        report.process = Some(ProcessReport {
            first_token_ms: BestWorst { best: 2_000.0, worst: 150.0 },
            resident_bytes: 0,
            weight_bytes: 0,
            pool_bytes: 0,
            memory_ratio: 1.15,
        });
        assert_eq!((judge(&report, &config).len(), missed(&report, &config)), (4, vec![]));
        let row = &mut report.engines[0];
        (row.decode_b1_ratio_beside, row.decode_b8_tps.best) = (0.846, 299.0);
        let process = report.process.as_mut().expect("it is there");
        (process.first_token_ms.best, process.memory_ratio) = (2_100.0, 1.2);
        let name = name(&report.engines[0]);
        assert_eq!(
            missed(&report, &config),
            [
                format!("{name}: decode of 1 sequence over its limit: 0.846, at least 0.850"),
                format!("{name}: decode of 8 sequences, tokens/s: 299, at least 300"),
                "from the start to the first token, ms: 2100, at most 2000".into(),
                "resident memory over weights and KV pool: 1.200, at most 1.150".into(),
            ]
        );
        // If memory is too slow for 300 tokens/s, the target does not apply.
        report.engines[0].decode_b8_limit_tps = 299.0;
        assert_eq!(missed(&report, &config).len(), 3);
        let larger = ModelConfig { layers: 32, ..config };
        assert_eq!(judge(&report, &larger).len(), 2, "ratios alone");
    }
}
