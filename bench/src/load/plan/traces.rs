//! Replay of public traces: arrival times, lengths and shared prefixes.
//!
//! | format | where from | a line |
//! |---|---|---|
//! | Mooncake | kvcache-ai/Mooncake, FAST'25 | JSON: `timestamp` in ms, `input_length`, `output_length`, `hash_ids`: one for each 512 tokens of the prompt and all before them |
//! | BurstGPT | HPMLL/BurstGPT, with or without its session columns | CSV: `Timestamp` in s, `Request tokens`, `Response tokens` |
//! | Azure | Azure/AzurePublicDataset, 2023 and 2024 | CSV: `TIMESTAMP` as a date and time, `ContextTokens`, `GeneratedTokens` |
//!
//! Lines are sorted by time, and the first is due at once. Lines without a prompt or a response (BurstGPT's
//! failures) are skipped and counted.

use std::io::BufRead;
use std::time::Duration;

use serde::Deserialize;

/// Tokens of a Mooncake block.
pub(crate) const BLOCK_TOKENS: u32 = 512;
/// Maximum bytes of a line. A Mooncake request of a million tokens has 2,000 hashes.
const LINE_BYTES_MAX: u64 = 1 << 20;
/// Maximum hashes of all lines together, a limit of memory.
const HASHES_MAX: usize = 64 << 20;
/// Maximum tokens of a prompt or a response.
const TOKENS_MAX: u64 = 10_000_000;

/// The format of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Format {
    /// Detects the format from the first line
    Auto,
    /// Mooncake's JSON lines
    Mooncake,
    /// BurstGPT's CSV
    Burstgpt,
    /// CSV of Azure's LLM inference traces
    Azure,
}

/// One request of a trace.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TraceRequest {
    /// Time after the first request.
    pub(crate) at: Duration,
    pub(crate) input_tokens: u32,
    pub(crate) output_tokens: u32,
    /// One hash for each [`BLOCK_TOKENS`] of the prompt, the last of which may be partial. Empty if the format has
    /// none.
    pub(crate) blocks: Vec<u64>,
}

/// A trace in order of time.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Trace {
    pub(crate) requests: Vec<TraceRequest>,
    /// Lines without a prompt or a response.
    pub(crate) left_out: usize,
}

/// Why a file is no trace.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TraceError {
    #[error("line {0}: {1}")]
    Line(usize, String),
    #[error("line {0}: longer than {LINE_BYTES_MAX} bytes")]
    LongLine(usize),
    #[error("{0}")]
    Read(#[from] std::io::Error),
    #[error("the first line is of no format that is known: JSON with `timestamp`, or a CSV's header")]
    Unknown,
    #[error("there is no request in it")]
    Empty,
    #[error("more than {0} requests or {HASHES_MAX} hashes; use --limit")]
    TooLarge(usize),
}

/// The columns of a CSV that are read.
struct CsvColumns {
    at: usize,
    input: usize,
    output: usize,
    /// Reads a time, in seconds.
    time: fn(&str) -> Option<f64>,
}

enum TraceReader {
    Mooncake,
    Csv(CsvColumns),
}

#[derive(Deserialize)]
struct MooncakeLine {
    timestamp: f64,
    #[serde(alias = "input_tokens")]
    input_length: u64,
    #[serde(alias = "output_tokens")]
    output_length: u64,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// Reads the first `limit` requests of a trace.
///
/// # Errors
/// [`TraceError`], with the line number.
pub(crate) fn read(mut file: impl BufRead, format: Format, limit: usize) -> Result<Trace, TraceError> {
    let (mut line, mut number, mut hashes) = (Vec::new(), 0, 0);
    let mut reader = None;
    let (mut found, mut left_out) = (Vec::new(), 0);
    while found.len() < limit {
        line.clear();
        number += 1;
        if std::io::Read::take(&mut file, LINE_BYTES_MAX + 1).read_until(b'\n', &mut line)? == 0 {
            break;
        }
        if line.len() as u64 > LINE_BYTES_MAX {
            return Err(TraceError::LongLine(number));
        }
        let wrong = |why: String| TraceError::Line(number, why);
        let text = std::str::from_utf8(&line).map_err(|_| wrong("not UTF-8".to_owned()))?;
        let text = text.trim_start_matches('\u{feff}').trim();
        if text.is_empty() {
            continue;
        }
        let request = match &reader {
            None => {
                let chosen = choose(text, format).ok_or(TraceError::Unknown)?;
                let is_header = matches!(chosen, TraceReader::Csv(_));
                let chosen = reader.insert(chosen);
                if is_header {
                    continue;
                }
                chosen.line(text)
            }
            Some(reader) => reader.line(text),
        };
        let (at, request) = request.map_err(wrong)?;
        if request.input_tokens == 0 || request.output_tokens == 0 {
            left_out += 1;
            continue;
        }
        hashes += request.blocks.len();
        found.push((at, request));
        if hashes > HASHES_MAX || found.len() > crate::load::plan::arrivals::REQUESTS_MAX {
            return Err(TraceError::TooLarge(crate::load::plan::arrivals::REQUESTS_MAX));
        }
    }
    found.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let first = found.first().ok_or(TraceError::Empty)?.0;
    let requests = found.into_iter().map(|(at, request)| {
        // Finite and not before the first.
        TraceRequest { at: Duration::try_from_secs_f64(at - first).unwrap_or(Duration::MAX), ..request }
    });
    Ok(Trace { requests: requests.collect(), left_out })
}

/// The reader for a file with this first line.
fn choose(first: &str, format: Format) -> Option<TraceReader> {
    let json = first.starts_with('{');
    match format {
        Format::Auto | Format::Mooncake if json => Some(TraceReader::Mooncake),
        Format::Auto => azure(first).or_else(|| burstgpt(first)).map(TraceReader::Csv),
        Format::Mooncake => None,
        Format::Burstgpt => burstgpt(first).map(TraceReader::Csv),
        Format::Azure => azure(first).map(TraceReader::Csv),
    }
}

fn columns(header: &str, names: [&str; 3], time: fn(&str) -> Option<f64>) -> Option<CsvColumns> {
    let place = |name: &str| header.split(',').position(|column| column.trim().eq_ignore_ascii_case(name));
    let [at, input, output] = names.map(place);
    Some(CsvColumns { at: at?, input: input?, output: output?, time })
}

fn azure(header: &str) -> Option<CsvColumns> {
    columns(header, ["TIMESTAMP", "ContextTokens", "GeneratedTokens"], date_and_time)
}

fn burstgpt(header: &str) -> Option<CsvColumns> {
    columns(header, ["Timestamp", "Request tokens", "Response tokens"], |text| text.parse().ok())
}

impl TraceReader {
    /// Seconds, and a request whose time is not set yet.
    fn line(&self, text: &str) -> Result<(f64, TraceRequest), String> {
        let (at, input, output, blocks) = match self {
            Self::Mooncake => {
                let line: MooncakeLine = serde_json::from_str(text).map_err(|error| error.to_string())?;
                let blocks_max = line.input_length.div_ceil(u64::from(BLOCK_TOKENS));
                if line.hash_ids.len() as u64 > blocks_max {
                    let (hashes, tokens) = (line.hash_ids.len(), line.input_length);
                    return Err(format!("{hashes} hashes of {BLOCK_TOKENS} tokens each for {tokens} tokens"));
                }
                (line.timestamp / 1e3, line.input_length, line.output_length, line.hash_ids)
            }
            Self::Csv(CsvColumns { at, input, output, time }) => {
                let fields: Vec<_> = text.split(',').map(str::trim).collect();
                let field = |place: usize| {
                    fields.get(place).copied().ok_or_else(|| format!("{} columns only", fields.len()))
                };
                let count = |place: usize| {
                    let text = field(place)?;
                    text.parse::<u64>().map_err(|_| format!("`{text}` is no number of tokens"))
                };
                let when = field(*at)?;
                let at = time(when).ok_or_else(|| format!("`{when}` is no time"))?;
                (at, count(*input)?, count(*output)?, Vec::new())
            }
        };
        if !at.is_finite() || at.abs() > 1e12 {
            return Err("its time is beyond all bounds".to_owned());
        }
        let tokens = |tokens: u64| match u32::try_from(tokens) {
            Ok(few) if tokens <= TOKENS_MAX => Ok(few),
            _ => Err(format!("{tokens} tokens are more than {TOKENS_MAX}")),
        };
        let (input_tokens, output_tokens) = (tokens(input)?, tokens(output)?);
        Ok((at, TraceRequest { at: Duration::ZERO, input_tokens, output_tokens, blocks }))
    }
}

/// Parses `2023-11-16 18:15:46.6805900`, or with `T`, `Z` or an offset, to seconds since 1970.
fn date_and_time(text: &str) -> Option<f64> {
    let (date, rest) = text.split_at_checked(10)?;
    let rest = rest.strip_prefix([' ', 'T'])?;
    let clock_ends = rest.find(['Z', '+', '-']).unwrap_or(rest.len());
    let (clock, zone) = rest.split_at(clock_ends);
    let whole = |text: &str| -> Option<i64> {
        text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok())?
    };
    let mut date = date.split('-');
    let (year, month, day) = (whole(date.next()?)?, whole(date.next()?)?, whole(date.next()?)?);
    let mut clock = clock.split(':');
    let (hour, minute, second) = (whole(clock.next()?)?, whole(clock.next()?)?, clock.next()?);
    let (second, fraction) = second.split_once('.').unwrap_or((second, "0"));
    let (second, fraction) =
        (whole(second)?, fraction.bytes().all(|b| b.is_ascii_digit()).then_some(fraction)?);
    let fraction: f64 = format!("0.{fraction}").parse().ok()?;
    let zone = match zone {
        "" | "Z" => 0,
        _ => {
            let (hours, minutes) = zone[1..].split_once(':').unwrap_or((&zone[1..], "0"));
            let (hours, minutes) = (whole(hours)?, whole(minutes)?);
            // The widest offsets in use are -12:00 and +14:00.
            let offset = (hours < 24 && minutes < 60).then(|| hours * 3_600 + minutes * 60)?;
            if zone.starts_with('-') { -offset } else { offset }
        }
    };
    let valid =
        (1..=12).contains(&month) && (1..=31).contains(&day) && hour < 24 && minute < 60 && second <= 60;
    let ended = date.next().is_none() && clock.next().is_none();
    // Checked before any arithmetic: numbers with many digits would overflow.
    if !valid || !ended {
        return None;
    }
    // Days since 1970 in the proleptic Gregorian calendar, with years that begin in March (Hinnant's algorithm).
    let shifted = if month <= 2 { year - 1 } else { year };
    let (era, of_era) = (shifted.div_euclid(400), shifted.rem_euclid(400));
    let day_of_year = (153 * ((month + 9) % 12) + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + day_of_year - 719_468;
    let seconds = days * 86_400 + hour * 3_600 + minute * 60 + second - zone;
    Some(seconds as f64 + fraction)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(text: &str) -> Result<Trace, TraceError> {
        read(text.as_bytes(), Format::Auto, usize::MAX)
    }

    fn summary(trace: &Trace) -> Vec<(u128, u32, u32)> {
        trace.requests.iter().map(|one| (one.at.as_micros(), one.input_tokens, one.output_tokens)).collect()
    }

    #[test]
    fn mooncakes_lines_are_read() {
        let text = "{\"timestamp\": 27482, \"input_length\": 1100, \"output_length\": 52, \"hash_ids\": [46, 47, 2354]}\n\
            {\"timestamp\": 30535, \"input_length\": 600, \"output_length\": 26, \"hash_ids\": [46, 9]}\n\n\
            {\"timestamp\": 30536.5, \"input_length\": 1, \"output_length\": 1}";
        let trace = trace(text).expect("a trace");
        assert_eq!(summary(&trace), [(0, 1_100, 52), (3_053_000, 600, 26), (3_054_500, 1, 1)]);
        assert_eq!(trace.requests[0].blocks, [46, 47, 2_354]);
        assert_eq!(read(text.as_bytes(), Format::Mooncake, 1).expect("a trace").requests.len(), 1);
    }

    #[test]
    fn both_csvs_are_read_by_their_headers() {
        let burst = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\r\n\
            5,ChatGPT,472,18,490,Conversation log\r\n45.5,ChatGPT,1087,0,1087,Conversation log\r\n\
            118,GPT-4,417,276,693,API log\r\n";
        let trace_of = trace(burst).expect("a trace");
        assert_eq!((summary(&trace_of), trace_of.left_out), (vec![(0, 472, 18), (113_000_000, 417, 276)], 1));
        let sessions = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n\
            1,a-b,0.5,ChatGPT,7,8,15,API log\n";
        assert_eq!(summary(&trace(sessions).expect("a trace")), [(0, 7, 8)]);
        let azure = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:50.9951690,396,109\n\
            2023-11-16 18:15:46.6805900,374,44\n2023-11-17 00:00:00,1,2";
        let azure = trace(azure).expect("a trace");
        // In order of time, whatever the order in the file.
        assert_eq!(summary(&azure)[..2], [(0, 374, 44), (4_314_579, 396, 109)]);
        assert_eq!(summary(&azure)[2].0 / 1_000_000, 20_653);
    }

    #[test]
    fn a_date_is_a_time() {
        for (text, seconds) in [
            ("1970-01-01 00:00:00", 0.0),
            ("2000-02-29T12:00:00.5Z", 951_825_600.5),
            ("2024-05-10 00:00:00.009930+00:00", 1_715_299_200.009_93),
            ("2024-05-10 02:00:00+02:00", 1_715_299_200.0),
            ("1969-12-31 23:59:59", -1.0),
        ] {
            let read = date_and_time(text).unwrap_or_else(|| panic!("{text}"));
            assert!((read - seconds).abs() < 1e-5, "{text}: {read}");
        }
        for bad in [
            "",
            "2024-13-01 00:00:00",
            "2024-05-10",
            "2024-05-10 25:00:00",
            "2024-05-10 1:2",
            "é2024-05-1 00:00:00",
            "2024-05-10 00:00:00+9000000000000000000:00",
            "2024-05-10 00:00:00-00:9000000000000000000",
            "2024-05-10 00:00:00+24:00",
            "2024-05-10 9000000000000000000:00:00",
        ] {
            assert_eq!(date_and_time(bad), None, "{bad}");
        }
    }

    #[test]
    fn a_hostile_file_is_refused_with_the_line() {
        let header = "TIMESTAMP,ContextTokens,GeneratedTokens\n";
        for (bad, line) in [
            (format!("{header}2023-11-16 18:15:46,1,1\n2023-11-16,1,1"), 3),
            (format!("{header}2023-11-16 18:15:46,1"), 2),
            (format!("{header}2023-11-16 18:15:46,-1,1"), 2),
            (format!("{header}2023-11-16 18:15:46,99999999,1"), 2),
            ("{\"timestamp\":0,\"input_length\":1,\"output_length\":1}\n{\"timestamp\":\"x\"}".to_owned(), 2),
            ("{\"timestamp\":0,\"input_length\":512,\"output_length\":1,\"hash_ids\":[1,2]}".to_owned(), 1),
            ("{\"timestamp\":1e300,\"input_length\":1,\"output_length\":1}".to_owned(), 1),
        ] {
            match trace(&bad) {
                Err(TraceError::Line(number, _)) => assert_eq!(number, line, "{bad}"),
                other => panic!("{bad}: {other:?}"),
            }
        }
        assert!(matches!(trace("a,b,c\n1,2,3"), Err(TraceError::Unknown)));
        assert!(matches!(trace(header), Err(TraceError::Empty)));
        assert!(matches!(trace(&"a".repeat(2 << 20)), Err(TraceError::LongLine(1))));
        let wrong_format = read(header.as_bytes(), Format::Mooncake, 9);
        assert!(matches!(wrong_format, Err(TraceError::Unknown)));
    }
}
