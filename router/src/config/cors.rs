//! Cross-origin requests (CORS): the pages in browsers that may use the client listener.

use garde::Validate;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Every origin.
const ANY: &str = "*";

/// Pages of other origins that may call the client listener from a browser.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema, Validate)]
#[serde(deny_unknown_fields)]
pub struct CorsConfig {
    /// Origins as browsers send them, such as `https://chat.example.com`: scheme, host, and the port if it is not the
    /// scheme's own. Or only `*`: every origin. 1 to 256.
    #[garde(length(min = 1, max = 256), custom(is_alone), inner(custom(is_origin)))]
    pub origins: Vec<String>,
    /// Request headers that pages may send beyond those of the OpenAI and Anthropic SDKs. At most 64; default: none.
    #[serde(default)]
    #[garde(length(max = 64), inner(custom(is_header)))]
    pub headers: Vec<String>,
    /// Whether a browser may send its client certificate. An API key that the page sets needs no permission. Needs
    /// listed origins. Default false.
    #[serde(default)]
    #[garde(custom(has_listed(&self.origins)))]
    pub credentials: bool,
    /// How long a browser may reuse the answer to a preflight, in milliseconds. 0 to 86,400,000; default 600,000.
    #[serde(default = "default_max_age_ms")]
    #[garde(range(max = 86_400_000))]
    pub max_age_ms: u64,
}

impl CorsConfig {
    /// Whether every origin is allowed.
    pub(crate) fn allows_any(&self) -> bool {
        self.origins.iter().any(|origin| origin == ANY)
    }
}

fn default_max_age_ms() -> u64 {
    600_000
}

fn is_alone(origins: &[String], _: &()) -> garde::Result {
    match origins {
        [_, _, ..] if origins.iter().any(|origin| origin == ANY) => {
            Err(garde::Error::new("`*` means every origin: list it alone, or leave it out"))
        }
        _ => Ok(()),
    }
}

/// A browser's text is compared byte by byte, so text that no browser sends is a mistake.
fn is_origin(origin: &str, _: &()) -> garde::Result {
    if origin == ANY {
        return Ok(());
    }
    let error = |what: &str| Err(garde::Error::new(format!("{what}, such as `https://chat.example.com`")));
    let Some((scheme, authority)) = origin.split_once("://") else {
        return error("must be a scheme and a host");
    };
    if scheme.is_empty() || authority.is_empty() || authority.contains(['/', '?', '#', '@', '*', ',']) {
        return error("must be a scheme and a host without a path or a pattern");
    }
    if !origin.bytes().all(|byte| byte.is_ascii_graphic() && !byte.is_ascii_uppercase()) {
        return error("must be lower-case ASCII, as browsers send it");
    }
    match (scheme, authority.rsplit_once(':')) {
        ("https", Some((_, "443"))) | ("http", Some((_, "80"))) => {
            error("must leave out the scheme's own port, as browsers do")
        }
        _ => Ok(()),
    }
}

fn is_header(name: &str, _: &()) -> garde::Result {
    match hyper::header::HeaderName::try_from(name) {
        Ok(_) => Ok(()),
        Err(_) => Err(garde::Error::new("must be the name of a header")),
    }
}

fn has_listed(origins: &[String]) -> impl FnOnce(&bool, &()) -> garde::Result + '_ {
    move |credentials, _| {
        if *credentials && origins.iter().any(|origin| origin == ANY) {
            return Err(garde::Error::new(
                "needs listed origins: with `*` every page could use a client's certificate",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(yaml: &str) -> String {
        let config: CorsConfig = serde_saphyr::from_str(yaml).expect("the keys exist");
        config.validate().err().map(|report| report.to_string()).unwrap_or_default()
    }

    #[test]
    fn an_origin_is_what_a_browser_sends() {
        for origin in [
            "https://chat.example.com",
            "http://localhost:3000",
            "http://[::1]:8000",
            "https://a.b:8443",
            "tauri://localhost",
            "vscode-webview://0a1b",
            "*",
        ] {
            assert_eq!(problems(&format!("origins: ['{origin}']")), "", "{origin}");
        }
        for origin in [
            "",
            "null",
            "chat.example.com",
            "https://",
            "https://a.b/",
            "https://a.b/path",
            "https://*.a.b",
            "https://A.b",
            "https://a.b:443",
            "http://a.b:80",
            "https://u@a.b",
            "https://ä.b",
            "https://a.b, https://c.d",
            "https://a b",
        ] {
            assert_ne!(problems(&format!("origins: ['{origin}']")), "", "{origin}");
        }
        assert!(problems("origins: []").contains("length"));
    }

    #[test]
    fn every_origin_stands_alone_and_goes_without_credentials() {
        assert!(problems("origins: ['*', 'https://a.b']").contains("list it alone"));
        assert!(problems("{origins: ['*'], credentials: true}").contains("needs listed origins"));
        assert_eq!(problems("{origins: ['https://a.b'], credentials: true, headers: [x-app]}"), "");
        assert!(problems("{origins: ['*'], headers: ['x app']}").contains("name of a header"));
    }
}
