//! The headers by which a gateway's picker names engines. Pure.

use baton_openai::ApiError;
use hyper::header::HeaderMap;

use crate::config::{EngineUrl, Scheme};

/// The prefill engines: `HOST:PORT`, a list, or repeated.
pub(super) const PREFILLER: &str = "x-prefiller-host-port";
/// The data-parallel rank, by the sidecar's address for it. Deprecated in llm-d.
pub(super) const DATA_PARALLEL: &str = "x-data-parallel-host-port";

/// Removed from every request.
pub(crate) const ROUTING_HEADERS: [&str; 4] =
    [PREFILLER, "x-encoder-hosts-ports", "x-kv-cache-source-host-port", DATA_PARALLEL];

/// What the routing headers of a request contain.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct RoutingHeaders {
    prefillers: Vec<String>,
    pub data_parallel: Option<String>,
}

impl RoutingHeaders {
    /// A value that is not visible ASCII names nothing.
    pub(crate) fn read(headers: &HeaderMap) -> Self {
        let values = |name| headers.get_all(name).iter().map(|value| value.to_str().unwrap_or_default());
        let prefillers = values(PREFILLER).flat_map(|value| value.split(','));
        Self {
            prefillers: prefillers.map(|named| named.trim().to_owned()).collect(),
            data_parallel: values(DATA_PARALLEL).next().filter(|named| !named.is_empty()).map(str::to_owned),
        }
    }

    /// The prefill engine for this draw; 0 is the first one. An empty value is as good as none.
    pub(crate) fn prefiller(&self, draw: u64) -> Option<&str> {
        let count = u64::try_from(self.prefillers.len()).ok().filter(|count| *count > 0)?;
        let index = usize::try_from(draw % count).ok()?;
        self.prefillers.get(index).map(String::as_str).filter(|named| !named.is_empty())
    }
}

/// The address of a prefill engine. As in llm-d, `http://` may precede it.
///
/// # Errors
/// 400: it is no `HOST:PORT`.
pub(super) fn engine_url(named: &str, scheme: Scheme) -> Result<EngineUrl, ApiError> {
    let bare = named.strip_prefix("http://").unwrap_or(named).to_ascii_lowercase();
    let scheme = match scheme {
        Scheme::Http => "http",
        Scheme::Https => "https",
    };
    let url = format!("{scheme}://{bare}").parse::<EngineUrl>();
    // The text is the client's own, and a message with it could be long.
    url.map_err(|_| ApiError::invalid(PREFILLER, "the header must be HOST:PORT, or a list of them"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(lines: &[(&'static str, &'static str)]) -> RoutingHeaders {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, value.parse().expect("a value"));
        }
        RoutingHeaders::read(&headers)
    }

    #[test]
    fn engines_are_read_from_a_list_and_from_repeated_headers() {
        for lines in [
            &[(PREFILLER, "a:1, b:2 ,c:3")][..],
            &[(PREFILLER, "a:1"), (PREFILLER, "b:2"), (PREFILLER, "c:3")],
            &[(PREFILLER, "a:1,b:2"), (PREFILLER, "c:3")],
        ] {
            let headers = read(lines);
            let drawn: Vec<_> = (0..4).map(|draw| headers.prefiller(draw)).collect();
            assert_eq!(drawn, [Some("a:1"), Some("b:2"), Some("c:3"), Some("a:1")]);
        }
    }

    #[test]
    fn without_a_name_the_decode_engine_is_alone() {
        for lines in [&[][..], &[(PREFILLER, "")], &[(PREFILLER, " ")], &[(PREFILLER, ",a:1")]] {
            assert_eq!(read(lines).prefiller(0), None, "{lines:?}");
        }
        assert_eq!(read(&[(DATA_PARALLEL, "")]).data_parallel, None);
        assert_eq!(read(&[(DATA_PARALLEL, "h:1")]).data_parallel.as_deref(), Some("h:1"));
    }

    #[test]
    fn an_address_is_a_host_and_a_port_and_nothing_else() {
        let url = |named, scheme| engine_url(named, scheme).map(|url| url.to_string()).map_err(|e| e.status);
        assert_eq!(url("http://10.0.0.1:8000", Scheme::Http), Ok("http://10.0.0.1:8000".to_owned()));
        assert_eq!(url("Pod-1.ns:8000", Scheme::Https), Ok("https://pod-1.ns:8000".to_owned()));
        assert_eq!(url("[fd00::1]:8000", Scheme::Http), Ok("http://[fd00::1]:8000".to_owned()));
        for wrong in [
            "",
            "host",
            "host:",
            "host:0",
            "host:99999",
            "a@b:1",
            "b:1/x",
            "b:1?x",
            "https://b:1",
            ":1",
            "a b:1",
        ] {
            assert_eq!(url(wrong, Scheme::Http), Err(400), "{wrong}");
        }
    }
}
