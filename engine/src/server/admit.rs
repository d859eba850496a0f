//! Converts a checked request to sequences: model, prompts as tokens, context, handoff.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use baton_connector::RequestId;
use baton_connector::fetch::Fetch;
use baton_connector_leases::event_log;
use baton_openai::limits::PROMPT_LOGPROBS_MAX;
use baton_openai::{ApiError, Code, Endpoint, GenerateRequest, Input, TimeLeft};
use hyper::header::HeaderMap;
use tokio::sync::mpsc::{Receiver, Sender, channel};

use super::Frontend;
use super::access::random_u64;
use super::guard::HandoffGuard;
use super::transfer_params::{PARAMS, TransferIntent};
use crate::blocks::adapter::BlockAdapter;
use crate::blocks::hash::prompt_fingerprint_with;
use crate::engine_core::{DeadlineKind, Deadlines, SeqEvent, Submission};
use crate::run::rank::RequestGuard;
use crate::sampling::{SamplingParams, TokenExclusions};
use crate::scheduler::SchedulingPolicy;
use crate::scheduler::sequence::{NewSequence, Purpose, SeqId};

/// A request whose sequences are ready to be queued.
pub(super) struct AdmittedRequest {
    pub(super) submissions: Vec<Submission>,
    pub(super) events: Receiver<(u32, SeqEvent)>,
    /// The prompts, as tokens.
    pub(super) prompts: Vec<Vec<u32>>,
    /// Not yet part of the first submission. If it is dropped before that, it settles with the producer.
    pub(super) handoff: Option<HandoffGuard>,
    /// The core that will run them.
    pub(super) request_guard: RequestGuard,
}

impl AdmittedRequest {
    /// The same request, whose sequences end at these deadlines.
    pub(super) fn within(mut self, deadlines: Deadlines) -> Self {
        self.submissions.iter_mut().for_each(|submission| submission.deadlines = deadlines);
        self
    }
}

/// The deadlines in the headers of a request that arrived then.
///
/// # Errors
/// 400 for a header that is no time; 504 if no time is left.
pub(super) fn deadlines(headers: &HeaderMap, arrived: Instant) -> Result<Deadlines, ApiError> {
    let TimeLeft { first_token, whole } =
        TimeLeft::read(|name| headers.get(name).map(|value| value.as_bytes()))?;
    let no_time = |left: Option<Duration>| left.is_some_and(|left| left.is_zero());
    if no_time(whole) || no_time(first_token) {
        let kind = if no_time(whole) { DeadlineKind::Whole } else { DeadlineKind::FirstToken };
        return Err(timed_out(kind));
    }
    let at = |left: Option<Duration>| left.and_then(|left| arrived.checked_add(left));
    Ok(Deadlines { first_token: at(first_token), whole: at(whole) })
}

/// The error of a request whose deadline has passed.
pub(super) fn timed_out(kind: DeadlineKind) -> ApiError {
    let what = match kind {
        DeadlineKind::FirstToken => "the first token was not there within the time of the request",
        DeadlineKind::Whole => "the response was not complete within the time of the request",
    };
    ApiError::gateway_timeout(what).with_code(Code::RequestTimeout)
}

/// Converts a request to sequences. Nothing is queued yet; on an error the caller's guard settles.
pub(super) fn admit(
    frontend: &Frontend,
    request: &GenerateRequest,
    id: &RequestId,
    intent: &TransferIntent,
    request_guard: RequestGuard,
    arrived: Instant,
) -> Result<AdmittedRequest, ApiError> {
    let model = &frontend.model;
    let adapter = model.adapter(request.model.as_deref())?;
    check_priority(request.priority, request_guard.policy)?;
    check_sequences(request, request_guard.mailbox.submissions_max())?;
    let prompts = model.prompts(request)?;
    check_intent(frontend, request, &prompts, adapter, intent)?;
    check_prompt_logprobs(request, &prompts)?;
    let exclusions = TokenExclusions::resolve(request, &model.eos, &model.tokenizer, model.vocab)?;
    let mut most = 0;
    for prompt in &prompts {
        most = most.max(model.check_prompt(request, prompt)?);
    }
    let sequences = prompts.len() * request.n as usize;
    let (outbox, events) = channel((most + 3) * sequences);
    let random_seed = random_u64()?;
    let mut purpose = Some(match intent {
        TransferIntent::Plain => Purpose::Plain,
        TransferIntent::Produce { consumers, early } => {
            // A stream cannot carry an early handoff.
            Purpose::Produce { consumers: *consumers, early: *early && !request.stream }
        }
        TransferIntent::Consume(_) => Purpose::Consume(Fetch::new(frontend.load_failure)),
    });
    let tag = event_log::tag(request.user.as_deref());
    let mut submissions = Vec::with_capacity(sequences);
    for (at, prompt) in prompts.iter().enumerate() {
        let mut leader = None;
        for choice in 0..request.n {
            let index = at as u32 * request.n + choice;
            // Without a seed no two sequences draw alike: choices count up from this one.
            let random_seed = random_seed.wrapping_add(u64::from(at as u32) << 32);
            let sampling = SamplingParams::resolve(request, &model.defaults, &model.eos, random_seed);
            let sampling = SamplingParams { exclusions: exclusions.clone(), ..sampling }.for_choice(choice);
            let sequence = NewSequence {
                id: SeqId(frontend.next_sequence.fetch_add(1, Ordering::Relaxed)),
                request: id.clone(),
                prompt: prompt.clone(),
                stop: model.stop_rule(request, prompt.len()),
                // The first sequence has the handoff; the others of the request share its landed blocks.
                purpose: purpose.take().unwrap_or(Purpose::Plain),
                follows: leader,
                admitted_with_first: index > 0,
                cache_salt: request.cache_salt.as_deref().map(Into::into),
                adapter: adapter.cloned(),
                // The other choices have the same prompt.
                prompt_logprobs: request.prompt_logprobs().filter(|_| choice == 0),
                priority: request.priority,
            };
            leader = leader.or(Some(sequence.id));
            let outbox: Sender<_> = outbox.clone();
            let (target, grammar, tag) = (None, None, tag.clone());
            let deadlines = Deadlines::default();
            submissions.push(Submission {
                sequence,
                sampling,
                grammar,
                index,
                tag,
                outbox,
                target,
                arrived,
                deadlines,
            });
        }
    }
    Ok(AdmittedRequest { submissions, events, prompts, handoff: None, request_guard })
}

/// Refuses a priority that would have no effect. Clients recognize vLLM's words.
fn check_priority(priority: i32, policy: SchedulingPolicy) -> Result<(), ApiError> {
    if priority == 0 || policy == SchedulingPolicy::Priority {
        return Ok(());
    }
    let message = format!(
        "Got priority {priority} but Priority scheduling is not enabled. Leave `priority` out, or start the engine with \
         --scheduling-policy priority"
    );
    Err(ApiError::invalid("priority", message).with_code(Code::UnsupportedParameter))
}

/// Refuses requests whose reply would hold too many log-probabilities of prompts.
fn check_prompt_logprobs(request: &GenerateRequest, prompts: &[Vec<u32>]) -> Result<(), ApiError> {
    let tokens: usize = prompts.iter().map(Vec::len).sum();
    let entries = prompt_logprobs_of_reply(request, tokens);
    if entries <= PROMPT_LOGPROBS_MAX {
        return Ok(());
    }
    let field = if request.prompt.logprobs.is_some() { "prompt_logprobs" } else { "echo" };
    let message = format!(
        "the reply would have {entries} log-probabilities of the {tokens} tokens of its prompts, with the alternatives \
         of each choice; at most {PROMPT_LOGPROBS_MAX} are sent"
    );
    Err(ApiError::invalid(field, message))
}

/// Log-probabilities of prompts with this number of tokens in the whole reply. A completion has them in each choice.
fn prompt_logprobs_of_reply(request: &GenerateRequest, tokens: usize) -> usize {
    let entries = |top: Option<u32>, choices: u32| {
        let of_token = top.map_or(0, |top| top as usize + 1);
        tokens.saturating_mul(of_token).saturating_mul(choices as usize)
    };
    let choices = match request.endpoint {
        Endpoint::Completions => request.n,
        Endpoint::Chat => 1,
    };
    let echoed = entries(request.logprobs.filter(|_| request.echo), request.n);
    entries(request.prompt.logprobs, choices).saturating_add(echoed)
}

/// Refuses requests that the queue can never take, before tokenizing: with 429 they would be retried forever.
fn check_sequences(request: &GenerateRequest, most: usize) -> Result<(), ApiError> {
    let prompts = match &request.input {
        Input::Prompts(prompts) => prompts.len(),
        Input::Chat(_) => 1,
    };
    let sequences = prompts * request.n as usize;
    if sequences <= most {
        return Ok(());
    }
    let field = if request.n > 1 { "n" } else { "prompt" };
    let message = format!(
        "{prompts} prompts with `n` {} are {sequences} sequences; this engine queues {most}",
        request.n
    );
    Err(ApiError::invalid(field, message))
}

fn check_intent(
    frontend: &Frontend,
    request: &GenerateRequest,
    prompts: &[Vec<u32>],
    adapter: Option<&Arc<BlockAdapter>>,
    intent: &TransferIntent,
) -> Result<(), ApiError> {
    let refuse = |code: Code, message: String| Err(ApiError::invalid(PARAMS, message).with_code(code));
    let wrong_role = |field: &str| {
        let role = frontend.role.label();
        refuse(Code::KvWrongRole, format!("`{field}` is not served by an engine of role {role}"))
    };
    match intent {
        TransferIntent::Plain => Ok(()),
        TransferIntent::Produce { .. } if !frontend.role.produces() => wrong_role("do_remote_decode"),
        TransferIntent::Consume(_) if !frontend.role.consumes() => wrong_role("do_remote_prefill"),
        TransferIntent::Produce { .. } | TransferIntent::Consume(_) if prompts.len() != 1 => refuse(
            Code::KvUnsupported,
            format!("a handoff is of one prompt, this request has {}", prompts.len()),
        ),
        TransferIntent::Produce { .. } | TransferIntent::Consume(_)
            if request.prompt_logprobs().is_some() =>
        {
            let what = "log-probabilities of a prompt are computed where its tokens are generated";
            refuse(Code::KvUnsupported, format!("{what}, without a handoff"))
        }
        TransferIntent::Produce { .. } if request.n != 1 => {
            refuse(Code::KvUnsupported, format!("a handoff is of one sequence, `n` is {}", request.n))
        }
        TransferIntent::Produce { .. } => Ok(()),
        TransferIntent::Consume(handoff) => {
            let prompt = &prompts[0];
            frontend.blocks.check(handoff)?;
            let fingerprint = prompt_fingerprint_with(prompt, adapter.map(|adapter| &adapter.digest));
            if handoff.tokens == prompt.len() && handoff.prompt == fingerprint {
                return Ok(());
            }
            let (theirs, ours) = (handoff.tokens, prompt.len());
            // A fingerprint does not show which of both differs.
            let of = if frontend.model.adapters.is_empty() { "prompt" } else { "prompt or another adapter" };
            let message = format!("the handoff is of another {of} ({theirs} tokens there, {ours} here)");
            refuse(Code::KvPromptMismatch, message)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(endpoint: Endpoint, fields: &str) -> GenerateRequest {
        let input = match endpoint {
            Endpoint::Completions => r#""prompt": "x""#,
            Endpoint::Chat => r#""messages": [{"role": "user", "content": "x"}]"#,
        };
        let body = format!("{{{input}, {fields}}}");
        baton_openai::parse(endpoint, body.as_bytes(), &baton_openai::ParseLimits::default())
            .expect("a sound request")
    }

    #[test]
    fn log_probabilities_of_a_prompt_count_as_often_as_they_are_sent() {
        let cases = [
            (Endpoint::Completions, r#""prompt_logprobs": 3"#, 4),
            (Endpoint::Completions, r#""prompt_logprobs": 3, "n": 5"#, 20),
            (Endpoint::Completions, r#""prompt_logprobs": 3, "logprobs": 1, "n": 5"#, 20),
            (Endpoint::Completions, r#""prompt_logprobs": 3, "logprobs": 1, "echo": true, "n": 5"#, 30),
            (Endpoint::Completions, r#""logprobs": 1, "echo": true, "n": 5"#, 10),
            (Endpoint::Completions, r#""echo": true, "n": 5"#, 0),
            (Endpoint::Chat, r#""prompt_logprobs": 3, "n": 5"#, 4),
        ];
        for (endpoint, fields, of_token) in cases {
            let request = request(endpoint, fields);
            assert_eq!(prompt_logprobs_of_reply(&request, 7), 7 * of_token, "{fields}");
        }
    }

    #[test]
    fn a_priority_without_effect_is_refused_by_name() {
        for (priority, policy) in [
            (0, SchedulingPolicy::Fcfs),
            (0, SchedulingPolicy::Priority),
            (-3, SchedulingPolicy::Priority),
            (i32::MAX, SchedulingPolicy::Priority),
        ] {
            assert_eq!(check_priority(priority, policy), Ok(()));
        }
        let error = check_priority(5, SchedulingPolicy::Fcfs).expect_err("no effect");
        assert_eq!((error.status, error.param.as_deref()), (400, Some("priority")));
        let read = |value: &str| {
            let body = format!(r#"{{"prompt": "x", "priority": {value}}}"#);
            baton_openai::parse(Endpoint::Completions, body.as_bytes(), &baton_openai::ParseLimits::default())
        };
        assert_eq!(read("-7").map(|request| request.priority), Ok(-7));
        assert_eq!(read("null").map(|request| request.priority), Ok(0));
        for value in ["1.5", "\"high\"", "2147483648", "true"] {
            let error = read(value).expect_err(value);
            assert_eq!(error.param.as_deref(), Some("priority"), "{value}");
        }
    }

    #[test]
    fn a_request_has_the_deadlines_of_its_headers() {
        let arrived = Instant::now();
        let of = |pairs: &[(&'static str, &'static str)]| {
            let headers = pairs
                .iter()
                .map(|(name, value)| (name.parse().expect("a name"), value.parse().expect("a value")));
            deadlines(&headers.collect(), arrived)
        };
        let after = |ms| Some(arrived + Duration::from_millis(ms));
        assert_eq!(of(&[]), Ok(Deadlines::default()));
        assert_eq!(
            of(&[("x-request-timeout-ms", "900"), ("x-first-token-timeout-ms", "80")]),
            Ok(Deadlines { first_token: after(80), whole: after(900) })
        );
        let late = of(&[("x-request-timeout-ms", "0")]).expect_err("no time");
        assert_eq!((late.status, late.code.as_deref()), (504, Some("request_timeout")));
        let wrong = of(&[("x-first-token-timeout-ms", "soon")]).expect_err("no number");
        assert_eq!((wrong.status, wrong.param.as_deref()), (400, Some("x-first-token-timeout-ms")));
    }

    #[test]
    fn too_many_log_probabilities_of_prompts_are_refused_by_their_field() {
        let check = |fields: &str, tokens: usize| {
            let request = request(Endpoint::Completions, fields);
            check_prompt_logprobs(&request, &[vec![0; tokens / 2], vec![0; tokens / 2]])
        };
        let most = PROMPT_LOGPROBS_MAX / 8;
        assert!(check(r#""prompt_logprobs": 1, "n": 4"#, most).is_ok());
        let both = r#""prompt_logprobs": 0, "logprobs": 0, "echo": true, "n": 4"#;
        assert!(check(both, most).is_ok());
        for (fields, field) in [
            (r#""prompt_logprobs": 1, "n": 4"#, "prompt_logprobs"),
            (both, "prompt_logprobs"),
            (r#""logprobs": 1, "echo": true, "n": 4"#, "echo"),
        ] {
            let error = check(fields, most + 2).expect_err("too many");
            assert_eq!(error.param.as_deref(), Some(field), "{fields}");
        }
    }
}
