//! `GET /top`: the deployment on one page. The page contains no data. Its script reads `/debug/kv` of the same
//! listener, with the admin token where one is required, and inserts values as text only.

use std::sync::LazyLock;

use hyper::header::{HeaderName, HeaderValue};
use sha2::{Digest, Sha256};

use super::AdminResponse;

/// One file, which loads nothing else and reads no value as HTML.
const PAGE: &str = include_str!("top.html");

/// Content security policy: only this script and these styles, requests to this listener only, no framing.
static POLICY: LazyLock<HeaderValue> = LazyLock::new(|| {
    let policy = format!(
        "default-src 'none'; script-src 'sha256-{}'; style-src 'sha256-{}'; img-src data:; connect-src 'self'; \
         base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
        digest("script"),
        digest("style")
    );
    HeaderValue::from_str(&policy).expect("printable ASCII")
});

/// The page.
pub(super) fn page() -> AdminResponse {
    AdminResponse::text(PAGE).with_type("text/html; charset=utf-8").with_headers(vec![
        (HeaderName::from_static("content-security-policy"), POLICY.clone()),
        (HeaderName::from_static("x-content-type-options"), HeaderValue::from_static("nosniff")),
        (HeaderName::from_static("referrer-policy"), HeaderValue::from_static("no-referrer")),
    ])
}

/// The Base64 digest that a browser computes of the content of the page's one element of that name.
fn digest(element: &str) -> String {
    let (begin, end) = (format!("<{element}>"), format!("</{element}>"));
    let content = PAGE.split_once(&begin).and_then(|(_, rest)| rest.split_once(&end));
    let (content, _) = content.expect("the page has one of each");
    base64(&Sha256::digest(content.as_bytes()))
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let mut text = String::new();
    for three in bytes.chunks(3) {
        let number = three.iter().fold(0, |sum, byte| sum << 8 | u32::from(*byte)) << (8 * (3 - three.len()));
        for at in 0..4 {
            let digit = DIGITS[(number >> (18 - 6 * at) & 63) as usize];
            text.push(if at <= three.len() { char::from(digit) } else { '=' });
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn base64_is_that_of_the_standard() {
        for (plain, text) in
            [("", ""), ("f", "Zg=="), ("fo", "Zm8="), ("foo", "Zm9v"), ("foobar", "Zm9vYmFy")]
        {
            assert_eq!(base64(plain.as_bytes()), text);
        }
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }

    #[test]
    fn the_page_loads_no_other_origin_and_parses_no_data_as_html() {
        assert_eq!((PAGE.matches("<script").count(), PAGE.matches("<style").count()), (1, 1));
        for word in
            ["innerHTML", "outerHTML", "insertAdjacent", "document.write", "eval(", "src=", "@import", "url("]
        {
            assert!(!PAGE.contains(word), "{word}");
        }
        let foreign = PAGE.replace("http://www.w3.org/2000/svg", "");
        assert!(!foreign.contains("http://") && !foreign.contains("https://"));
        assert!(!PAGE.contains(" style="), "the policy does not let it");
    }
}
