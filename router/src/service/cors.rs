//! The headers that let pages of other origins use the router (CORS, the Fetch standard), pure.
//!
//! A browser sends `Origin` with each cross-origin request. Before a request with a key or JSON it sends a preflight:
//! `OPTIONS` with `Access-Control-Request-Method`, without the key. Every response has these headers, errors included,
//! because a page cannot read a response without them. A page of another origin gets none of them: its browser then
//! withholds the response.

use std::time::Duration;

use hyper::Method;
use hyper::header::{
    ACCESS_CONTROL_ALLOW_CREDENTIALS, ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS,
    ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE,
    ACCESS_CONTROL_REQUEST_HEADERS, ACCESS_CONTROL_REQUEST_METHOD, HeaderMap, HeaderName, HeaderValue,
    ORIGIN, VARY,
};

use crate::config::CorsConfig;

/// Request headers that the SDKs and the router's own API use.
const ALLOWED: [&str; 12] = [
    "authorization",
    "content-type",
    "x-api-key",
    "anthropic-version",
    "anthropic-beta",
    "anthropic-dangerous-direct-browser-access",
    "x-request-id",
    "x-request-timeout-ms",
    "x-first-token-timeout-ms",
    "x-priority",
    "x-session-id",
    "traceparent",
];

/// The SDKs' own headers, whose number grows with their versions.
const ALLOWED_PREFIXES: [&str; 2] = ["x-stainless-", "openai-"];

/// Response headers that a page may read.
const EXPOSED: &str = "x-request-id, retry-after, retry-after-ms, x-should-retry, x-ratelimit-limit-requests, \
    x-ratelimit-remaining-requests, x-ratelimit-reset-requests, x-ratelimit-limit-tokens, \
    x-ratelimit-remaining-tokens, x-ratelimit-reset-tokens, server-timing";

/// The headers of the response to a request.
pub(super) fn headers(
    config: &CorsConfig,
    method: &Method,
    request: &HeaderMap,
) -> Vec<(HeaderName, HeaderValue)> {
    let any = config.allows_any();
    // A cache must not give one origin's response to another origin.
    let mut headers = Vec::new();
    if !any {
        headers.push((VARY, HeaderValue::from_static("origin")));
    }
    let mut origins = request.get_all(ORIGIN).iter();
    let (Some(origin), None) = (origins.next(), origins.next()) else { return headers };
    let is_listed = || config.origins.iter().any(|listed| listed.as_bytes() == origin.as_bytes());
    if !any && !is_listed() {
        return headers;
    }
    let allowed = if any { HeaderValue::from_static("*") } else { origin.clone() };
    headers.push((ACCESS_CONTROL_ALLOW_ORIGIN, allowed));
    if config.credentials {
        headers.push((ACCESS_CONTROL_ALLOW_CREDENTIALS, HeaderValue::from_static("true")));
    }
    if *method != Method::OPTIONS || !request.contains_key(ACCESS_CONTROL_REQUEST_METHOD) {
        headers.push((ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_static(EXPOSED)));
        return headers;
    }
    headers.push((ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, HEAD, POST")));
    headers.push((ACCESS_CONTROL_MAX_AGE, Duration::from_millis(config.max_age_ms).as_secs().into()));
    if let Ok(names) = HeaderValue::try_from(allowed_of(config, request)) {
        headers.push((ACCESS_CONTROL_ALLOW_HEADERS, names));
    }
    headers
}

/// The allowed ones of the headers that a page wants to send.
fn allowed_of(config: &CorsConfig, request: &HeaderMap) -> String {
    let lines = request.get_all(ACCESS_CONTROL_REQUEST_HEADERS).iter().filter_map(|line| line.to_str().ok());
    let names = lines.flat_map(|line| line.split(',')).map(str::trim);
    let is_allowed = |name: &&str| {
        let is = |known: &str| known.eq_ignore_ascii_case(name);
        let begins = |prefix: &str| {
            name.get(..prefix.len()).is_some_and(|begin| begin.eq_ignore_ascii_case(prefix))
                && HeaderName::try_from(*name).is_ok()
        };
        ALLOWED.into_iter().any(is)
            || ALLOWED_PREFIXES.into_iter().any(begins)
            || config.headers.iter().any(|name| is(name))
    };
    names.filter(is_allowed).collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(origins: &[&str], credentials: bool) -> CorsConfig {
        CorsConfig {
            origins: origins.iter().map(|origin| (*origin).to_owned()).collect(),
            headers: vec!["x-app".to_owned()],
            credentials,
            max_age_ms: 600_000,
        }
    }

    /// The response's headers as text, one per line.
    fn of(config: &CorsConfig, method: Method, request: &[(HeaderName, &str)]) -> Vec<String> {
        let mut map = HeaderMap::new();
        for (name, value) in request {
            map.append(name, HeaderValue::from_str(value).expect("a value"));
        }
        let text =
            |(name, value): &(HeaderName, HeaderValue)| format!("{name}: {}", value.to_str().expect("text"));
        headers(config, &method, &map).iter().map(text).collect()
    }

    #[test]
    fn only_a_listed_origin_may_read_a_response() {
        let listed = config(&["https://a.b", "http://localhost:3000"], false);
        let expected = format!("access-control-expose-headers: {EXPOSED}");
        assert_eq!(
            of(&listed, Method::POST, &[(ORIGIN, "http://localhost:3000")]),
            ["vary: origin", "access-control-allow-origin: http://localhost:3000", &expected]
        );
        for origins in [
            vec![],
            vec!["https://evil"],
            vec!["https://a.b.evil"],
            vec!["https://a"],
            vec!["null"],
            vec!["*"],
            vec!["https://A.b"],
            vec!["https://a.b", "https://a.b"],
            vec!["https://a.b, https://c"],
        ] {
            let request: Vec<_> = origins.iter().map(|origin| (ORIGIN, *origin)).collect();
            assert_eq!(of(&listed, Method::POST, &request), ["vary: origin"], "{origins:?}");
        }
    }

    #[test]
    fn every_origin_gets_a_response_that_does_not_depend_on_it() {
        let any = config(&["*"], false);
        let headers = of(&any, Method::GET, &[(ORIGIN, "https://evil")]);
        assert_eq!(headers[0], "access-control-allow-origin: *");
        assert!(
            !headers.iter().any(|line| line.starts_with("vary") || line.contains("credentials")),
            "{headers:?}"
        );
        assert!(of(&any, Method::GET, &[]).is_empty());
    }

    #[test]
    fn a_preflight_allows_the_known_headers_and_no_others() {
        let config = config(&["https://a.b"], true);
        let asked = "authorization,X-Stainless-Lang, x-app,cookie, x-stainless-a b,x-evil";
        let preflight = [
            (ORIGIN, "https://a.b"),
            (ACCESS_CONTROL_REQUEST_METHOD, "POST"),
            (ACCESS_CONTROL_REQUEST_HEADERS, asked),
            (ACCESS_CONTROL_REQUEST_HEADERS, "Anthropic-Version"),
        ];
        assert_eq!(
            of(&config, Method::OPTIONS, &preflight),
            [
                "vary: origin",
                "access-control-allow-origin: https://a.b",
                "access-control-allow-credentials: true",
                "access-control-allow-methods: GET, HEAD, POST",
                "access-control-max-age: 600",
                "access-control-allow-headers: authorization, X-Stainless-Lang, x-app, Anthropic-Version",
            ]
        );
        let other = [(ORIGIN, "https://c.d"), preflight[1].clone(), preflight[2].clone()];
        assert_eq!(of(&config, Method::OPTIONS, &other), ["vary: origin"]);
    }
}
