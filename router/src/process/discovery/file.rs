//! Discovery by a file of engines, which another program writes. The file is read repeatedly, so that a rename
//! over it, a ConfigMap's switch of symbolic links and a file system without notifications all work.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use crate::config::EndpointsFileConfig;
use crate::config::read::named_file::read_text;
use crate::engines::discovery_sources::{ENDPOINTS_MAX, Endpoint};

/// Maximum bytes of the file.
const BYTES_MAX: u64 = 4 << 20;
/// Maximum invalid entries of one file that are logged.
const WARNINGS_MAX: usize = 8;

/// Reads the file repeatedly, until it is dropped.
pub(super) async fn follow(config: &EndpointsFileConfig, report: impl Fn(Result<Vec<Endpoint>, String>)) {
    let mut before = None;
    loop {
        let path = config.path.clone();
        let read = move || read_text(&path, BYTES_MAX).map_err(|error| error.to_string());
        let read = tokio::task::spawn_blocking(read).await.unwrap_or_else(|error| Err(error.to_string()));
        if before.as_ref() != Some(&read) {
            report(read.as_ref().map_err(Clone::clone).and_then(|text| endpoints(text)));
            before = Some(read);
        }
        tokio::time::sleep(Duration::from_millis(config.refresh_ms)).await;
    }
}

/// The engines in a text. Invalid entries are skipped, unless all are invalid.
fn endpoints(text: &str) -> Result<Vec<Endpoint>, String> {
    let budget = serde_saphyr::options! {
        budget: serde_saphyr::budget! { max_depth: 16, max_aliases: 0 },
        with_snippet: false,
    };
    let value: Value =
        serde_saphyr::from_str_with_options(text, budget).map_err(|error| error.to_string())?;
    let list = match &value {
        Value::Array(list) => list,
        Value::Object(map) => {
            let list = map.get("endpoints").or_else(|| map.get("engines")).and_then(Value::as_array);
            list.ok_or("neither a list nor a map with a list of `engines` or `endpoints`")?
        }
        _ => return Err("neither a list nor a map".into()),
    };
    let (mut found, mut invalid) = (Vec::new(), 0);
    for (at, entry) in list.iter().enumerate().take(ENDPOINTS_MAX) {
        match endpoint(entry) {
            Ok(endpoint) => found.push(endpoint),
            Err(error) => {
                invalid += 1;
                if invalid <= WARNINGS_MAX {
                    tracing::warn!(
                        event = "discovery_entry_skipped",
                        entry = at,
                        error,
                        "discovery file entry skipped"
                    );
                }
            }
        }
    }
    if found.is_empty() && invalid > 0 {
        return Err(format!("none of its {invalid} entries is an engine"));
    }
    Ok(found)
}

fn endpoint(entry: &Value) -> Result<Endpoint, String> {
    let text = |key: &str| entry[key].as_str();
    let url = match (entry.as_str().or_else(|| text("url")), text("address")) {
        (Some(url), _) => url.to_owned(),
        (None, Some(address)) => {
            let port = &entry["port"];
            let port = port.as_str().map_or_else(|| port.to_string(), str::to_owned);
            let colons = address.contains(':') && !address.starts_with('[');
            if colons { format!("http://[{address}]:{port}") } else { format!("http://{address}:{port}") }
        }
        (None, None) => return Err("needs `url`, or `address` and `port`".into()),
    };
    let url = url.parse().map_err(|error: crate::config::UrlError| error.to_string())?;
    let weight = match &entry["weight"] {
        Value::Null => None,
        weight => {
            let weight = weight.as_u64().and_then(|w| u32::try_from(w).ok());
            Some(weight.filter(|w| (1..=1000).contains(w)).ok_or("weight must be from 1 to 1,000")?)
        }
    };
    let mut labels = BTreeMap::new();
    for (name, value) in entry["labels"].as_object().into_iter().flatten().take(32) {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        labels.insert(name.clone(), value);
    }
    if let Some(name) = text("name") {
        labels.entry("name".into()).or_insert_with(|| name.to_owned());
    }
    Ok(Endpoint { url, weight, labels })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn urls(text: &str) -> Result<Vec<String>, String> {
        Ok(endpoints(text)?.iter().map(|endpoint| endpoint.url.to_string()).collect())
    }

    #[test]
    fn every_shape_of_file_is_read() {
        let wanted = ["http://10.0.0.1:8000", "http://10.0.0.2:8000"].map(str::to_owned).to_vec();
        for text in [
            "- http://10.0.0.1:8000\n- url: http://10.0.0.2:8000\n",
            "engines: [{url: 'http://10.0.0.1:8000'}, {url: 'http://10.0.0.2:8000', weight: 3}]",
            r#"{"endpoints": [{"name": "a", "address": "10.0.0.1", "port": "8000", "labels": {"role": "decode"}},
                {"name": "b", "address": "10.0.0.2", "port": 8000}]}"#,
        ] {
            assert_eq!(urls(text).as_ref(), Ok(&wanted), "{text}");
        }
        assert_eq!(urls("[]"), Ok(vec![]), "an empty list is an answer");
        let six = endpoints("endpoints: [{name: x, address: 'fd00::1', port: 1, labels: {zone: a, n: 1}}]");
        let six = six.expect("it is an endpoint").remove(0);
        assert_eq!(six.url.to_string(), "http://[fd00::1]:1");
        let labels = [("n", "1"), ("name", "x"), ("zone", "a")].map(|(n, v)| (n.to_owned(), v.to_owned()));
        assert_eq!(six.labels, BTreeMap::from(labels));
    }

    #[test]
    fn an_entry_that_is_none_is_skipped_and_a_file_of_such_is_refused() {
        let mixed = "[{url: 'ftp://a:1'}, 7, {weight: 1}, {url: 'http://b:1', weight: 0}, 'http://a:1']";
        assert_eq!(urls(mixed), Ok(vec!["http://a:1".to_owned()]));
        for text in ["[{url: 'ftp://a:1'}]", "nothing: here", "7", "[", "a: &a [*a]"] {
            assert!(urls(text).is_err(), "{text}");
        }
        assert!(urls(&format!("{}{}", "[".repeat(5000), "]".repeat(5000))).is_err());
    }
}
