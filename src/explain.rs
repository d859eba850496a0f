//! `baton explain`: requests from a router's admin listener why a request was routed to its engines, or where one would
//! be routed, and prints the explanation.

use std::fmt::Write as _;
use std::io::Write as _;

use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::BorrowedFormatItem;
use time::macros::format_description;

use crate::Failure;
use crate::admin_client::AdminClient;
use crate::cli::ExplainArgs;
use crate::output::CommandOutput;

/// The form of a point in time.
const MOMENT: &[BorrowedFormatItem<'_>] =
    format_description!("[year]-[month]-[day] [hour]:[minute]:[second].[subsecond digits:3]");

pub(crate) fn run(args: &ExplainArgs) -> Result<(), Failure> {
    let admin = AdminClient { address: &args.admin, token_file: args.admin_token_file.as_deref() };
    let answer = match (&args.dry_run, &args.id) {
        (Some(file), _) => {
            let body = std::fs::read(file).map_err(|error| format!("{}: {error}", file.display()))?;
            let path = args.path.clone().unwrap_or_else(|| path_of(&body).to_owned());
            let tenant = args.tenant.iter().map(|tenant| format!("&tenant={tenant}")).collect::<String>();
            admin.ask("POST", &format!("/dry-run?path={path}{tenant}"), &args.headers, &body)?
        }
        (None, Some(id)) => admin.ask("GET", &format!("/explain/{id}"), &[], b"")?,
        (None, None) => admin.ask("GET", "/explain", &[], b"")?,
    };
    if args.json {
        writeln!(CommandOutput, "{answer:#}")?;
    } else {
        write!(CommandOutput, "{}", told(&answer))?;
    }
    Ok(())
}

/// The endpoint for a body.
fn path_of(body: &[u8]) -> &'static str {
    let body: Value = serde_json::from_slice(body).unwrap_or(Value::Null);
    if body.get("messages").is_some() { "/v1/chat/completions" } else { "/v1/completions" }
}

/// Formats an explanation as text.
fn told(answer: &Value) -> String {
    let mut out = String::new();
    if let Some(requests) = answer["requests"].as_array() {
        // The list contains the number of steps of each request, an explanation contains the steps.
        let (accounts, lines): (Vec<_>, Vec<_>) =
            requests.iter().partition(|request| request["steps"].is_array());
        accounts.iter().for_each(|request| request_of(&mut out, request));
        if requests.is_empty() {
            out.push_str("no requests are kept\n");
        } else if !lines.is_empty() {
            list(&mut out, &lines);
        }
        return out;
    }
    let _ = writeln!(out, "model {}, configuration {}", text(&answer["model"]), answer["generation"]);
    choice(&mut out, "decode ", &answer["decode"]);
    disaggregation(&mut out, &answer["disaggregation"]);
    if !answer["prefill"].is_null() {
        choice(&mut out, "prefill", &answer["prefill"]);
    }
    out
}

/// Lists the latest requests, one line each, the newest first.
fn list(out: &mut String, requests: &[&Value]) {
    let heads = ["began (UTC)", "path", "model", "answer", "took", "id"].map(str::to_owned);
    let cells = |request: &&Value| {
        let client = request["client_id"].as_str().map_or_else(String::new, |id| format!(" (client's {id})"));
        [
            moment(request["began_ms"].as_u64()),
            text(&request["path"]).to_owned(),
            text(&request["model"]).to_owned(),
            answer_of(request),
            request["took_us"].as_u64().map_or_else(|| "-".to_owned(), time),
            format!("{}{client}", text(&request["id"])),
        ]
    };
    let rows: Vec<_> = std::iter::once(heads).chain(requests.iter().map(cells)).collect();
    let wide = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
    let [began, path, model, answer, took] = [0, 1, 2, 3, 4].map(wide);
    for row in &rows {
        let _ = writeln!(
            out,
            "{:<began$}  {:<path$}  {:<model$}  {:<answer$}  {:>took$}  {}",
            row[0], row[1], row[2], row[3], row[4], row[5]
        );
    }
}

fn answer_of(request: &Value) -> String {
    match request["status"].as_u64() {
        None => "in flight".to_owned(),
        Some(status) => format!("{status} {}", text(&request["outcome"])),
    }
}

/// Formats milliseconds of the Unix epoch as UTC.
fn moment(ms: Option<u64>) -> String {
    let nanos = ms.map(|ms| i128::from(ms) * 1_000_000);
    let at = nanos.and_then(|nanos| OffsetDateTime::from_unix_timestamp_nanos(nanos).ok());
    at.and_then(|at| at.format(MOMENT).ok()).unwrap_or_else(|| "-".to_owned())
}

fn request_of(out: &mut String, request: &Value) {
    let _ = write!(out, "request {}", text(&request["id"]));
    if let Some(client) = request["client_id"].as_str() {
        let _ = write!(out, " (client's {client})");
    }
    let began = moment(request["began_ms"].as_u64());
    let _ = write!(out, ", {} at {began} UTC, model {}", text(&request["path"]), text(&request["model"]));
    let _ = match request["status"].as_u64() {
        None => writeln!(out, ": still in flight"),
        Some(status) => writeln!(
            out,
            ": {status} {} after {}",
            text(&request["outcome"]),
            time(request["took_us"].as_u64().unwrap_or(0))
        ),
    };
    for step in request["steps"].as_array().into_iter().flatten() {
        let _ = write!(out, "{:>10}  ", time(step["at_us"].as_u64().unwrap_or(0)));
        let (leg, engine) = (text(&step["leg"]), text(&step["engine"]));
        let _ = match step["what"].as_str().unwrap_or_default() {
            "choose" => {
                choice(out, leg, step);
                Ok(())
            }
            "disaggregate" => {
                disaggregation(out, step);
                Ok(())
            }
            "ask" => writeln!(out, "{leg}: sent to {engine}"),
            "answer" => writeln!(out, "{leg}: {engine} {}", text(&step["came"])),
            _ => writeln!(out, "{}", text(&step["how"])),
        };
    }
    if let Some(left_out @ 1..) = request["steps_left_out"].as_u64() {
        let _ = writeln!(out, "            and {left_out} more steps");
    }
}

fn choice(out: &mut String, leg: &str, choice: &Value) {
    let reason = text(&choice["reason"]).replace('_', " ");
    let _ = match choice["chosen"].as_str() {
        Some(engine) => write!(out, "{leg}: {engine} ({}: {reason}", text(&choice["policy"])),
        None => write!(out, "{leg}: no engine ({}: {reason}", text(&choice["policy"])),
    };
    for (held, of, what) in [("chunks", "of_chunks", "chunks"), ("blocks", "of_blocks", "KV blocks")] {
        if let Some(all @ 1..) = choice["held"][of].as_u64() {
            let _ = write!(out, "; holds {} of {all} {what}", choice["held"][held]);
        }
    }
    out.push_str(")\n");
    let left_out = choice["held"]["kv_events_left_out"].as_object().into_iter().flatten();
    let left_out: Vec<String> = left_out.map(|(why, count)| format!("{why} {count}")).collect();
    if !left_out.is_empty() {
        let _ = writeln!(out, "              KV events ignored: {}", left_out.join(", "));
    }
    for candidate in choice["candidates"].as_array().into_iter().flatten() {
        let _ = writeln!(
            out,
            "              {} {}  in flight {}, tokens {}, weight {}, score {:.4}",
            if candidate["engine"] == choice["chosen"] { "*" } else { " " },
            text(&candidate["engine"]),
            candidate["requests"],
            candidate["tokens"],
            candidate["weight"],
            // Adding 0 turns a score of -0 into 0.
            candidate["score"].as_f64().unwrap_or(0.0) + 0.0,
        );
    }
    more(out, &choice["more_candidates"], "could have been chosen");
    for removed in choice["removed"].as_array().into_iter().flatten() {
        let _ = writeln!(out, "              - {}  {}", text(&removed["engine"]), text(&removed["why"]));
    }
    more(out, &choice["more_removed"], "could not");
}

fn more(out: &mut String, count: &Value, what: &str) {
    if let Some(count @ 1..) = count.as_u64() {
        let _ = writeln!(out, "                and {count} more that {what}");
    }
}

fn disaggregation(out: &mut String, decided: &Value) {
    let how = match decided["decision"].as_str() {
        Some("prefill_decode") => "another engine prefills",
        _ => "the decode engine computes everything",
    };
    let _ = writeln!(
        out,
        "{how}: {} (about {} prompt tokens, {:.0} % of them cached at the decode engine)",
        text(&decided["reason"]).replace('_', " "),
        decided["prompt_tokens"],
        decided["cached_share"].as_f64().unwrap_or(0.0) * 100.0,
    );
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or("-")
}

fn time(micros: u64) -> String {
    if micros < 1_000_000 {
        format!("{}.{:03} ms", micros / 1_000, micros % 1_000)
    } else {
        format!("{}.{:02} s", micros / 1_000_000, micros % 1_000_000 / 10_000)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn an_explanation_is_printed_step_by_step() {
        let choose = json!({
            "what": "choose", "at_us": 210, "leg": "decode", "policy": "least_load", "chosen": "d:1",
            "reason": "least_loaded", "pool": 3, "more_candidates": 0, "more_removed": 2,
            "candidates": [{"engine": "d:1", "requests": 0, "tokens": 0, "weight": 1, "score": 0.0}],
            "removed": [{"engine": "d:2", "why": "full"}],
            "held": {"chunks": 3, "of_chunks": 8, "blocks": 0, "of_blocks": 0,
                "kv_events_left_out": {"attention": 12, "tier": 3}},
        });
        let answer = json!({"requests": [{
            "id": "abc", "client_id": "mine", "model": "m", "status": 200, "outcome": "completed",
            "took_us": 1_250_000, "steps_left_out": 0, "path": "/v1/completions", "began_ms": 1_763_658_000_123_u64,
            "steps": [choose, {"what": "answer", "at_us": 900, "leg": "decode", "engine": "d:1", "came": "accepted"}],
        }]});
        let told = told(&answer);
        for part in [
            "request abc (client's mine), /v1/completions at 2025-11-20 17:00:00.123 UTC, model m: 200 completed after 1.25 s",
            "0.210 ms  decode: d:1 (least_load: least loaded; holds 3 of 8 chunks)",
            "KV events ignored: attention 12, tier 3",
            "* d:1  in flight 0",
            "- d:2  full",
            "and 2 more that could not",
            "0.900 ms  decode: d:1 accepted",
        ] {
            assert!(told.contains(part), "{part}\n{told}");
        }
    }

    #[test]
    fn the_list_has_the_time_and_the_path_of_each_request_in_columns() {
        let answer = json!({"requests": [
            {"id": "r-2", "client_id": null, "path": "/v1/completions", "model": "m", "status": null,
                "outcome": null, "took_us": null, "began_ms": 1_763_658_001_007_u64, "steps": 3},
            {"id": "r-1", "client_id": "mine", "path": "/v1/chat/completions", "model": "m", "status": 200,
                "outcome": "completed", "took_us": 812_500, "began_ms": 1_763_658_000_123_u64, "steps": 9},
            {"id": "r-0", "model": "m", "status": 499, "outcome": "client_gone", "took_us": 3_000, "steps": 2},
        ]});
        let expected = "\
            began (UTC)              path                  model  answer                 took  id\n\
            2025-11-20 17:00:01.007  /v1/completions       m      in flight                 -  r-2\n\
            2025-11-20 17:00:00.123  /v1/chat/completions  m      200 completed    812.500 ms  r-1 (client's mine)\n\
            -                        -                     m      499 client_gone    3.000 ms  r-0\n";
        assert_eq!(told(&answer), expected);
    }

    #[test]
    fn a_dry_run_is_printed_in_the_order_of_decisions() {
        let choice = json!({"policy": "random", "chosen": "p:1", "reason": "drawn"});
        let answer = json!({"model": "m", "generation": 3, "decode": choice, "prefill": null,
            "disaggregation": {"decision": "decode_only", "reason": "short_prompt", "prompt_tokens": 9,
                "cached_share": 0.25}});
        let told = told(&answer);
        assert!(told.contains("the decode engine computes everything: short prompt (about 9"), "{told}");
        assert!(!told.contains("prefill:"), "{told}");
    }

    #[test]
    fn the_endpoint_follows_from_the_body() {
        assert_eq!(path_of(br#"{"messages": []}"#), "/v1/chat/completions");
        assert_eq!(path_of(br#"{"prompt": "x"}"#), "/v1/completions");
    }
}
