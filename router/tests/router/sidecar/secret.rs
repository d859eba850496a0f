//! The cluster's secret: which engines get it, and its rotation.

use std::time::Duration;

use super::{TestSidecar, named};
use crate::harness::client::{Client, DISCONNECT_KINDS, get};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::system::await_requests;

const SECRET: &str = "0123456789abcdef";
const NEXT_SECRET: &str = "fedcba9876543210";

/// A file with the secret, which is removed with the folder.
fn secret_file() -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("secret");
    std::fs::write(&file, format!("{SECRET}\n")).unwrap();
    let file = file.display().to_string();
    (folder, file)
}

/// The secret of each request that an engine has received.
fn secrets(engine: &FakeEngine) -> Vec<Option<String>> {
    let of = |value: &hyper::header::HeaderValue| value.to_str().unwrap().to_owned();
    engine.all().iter().map(|request| request.headers.get("x-baton-cluster-secret").map(of)).collect()
}

#[tokio::test]
async fn a_listed_prefill_engine_gets_the_secret_with_each_request_and_the_decode_engine_never() {
    let (_folder, file) = secret_file();
    let (p, d) = (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::Hang).await);
    let yaml = format!("cluster-secret-file: '{file}'\nallow-prefiller: [127.0.0.1]");
    let sidecar = TestSidecar::with(&d, &yaml).await;
    let client = sidecar.begin(&format!("x-baton-cluster-secret: guess\r\n{}", named(&p)), true).await;
    await_requests(&d, 1).await;
    client.hang_up(DISCONNECT_KINDS[0]);
    p.wait("the release", |p| p.releases().len() == 1).await;
    d.wait("the abort", |d| d.aborts().len() == 1).await;
    sidecar.settled().await;
    assert_eq!(p.received().len(), 1);
    assert!(secrets(&p).iter().all(|secret| secret.as_deref() == Some(SECRET)), "{:?}", secrets(&p));
    // Also not with a request that is passed.
    let mut passed = Client::connect(sidecar.address).await;
    passed.send(b"GET /metrics HTTP/1.1\r\nhost: a\r\n\r\n").await;
    assert_eq!(passed.answer().await.status, 200);
    assert!(secrets(&d).len() >= 3 && secrets(&d).iter().all(Option::is_none), "{:?}", secrets(&d));
    assert!(!get(sidecar.admin, "/config").await.text().contains(SECRET));
}

#[tokio::test]
async fn an_engine_outside_the_list_gets_no_secret() {
    let (_folder, file) = secret_file();
    let (p, d) = (FakeEngine::always(Action::Hang).await, FakeEngine::always(Action::Whole(1)).await);
    let yaml = format!("cluster-secret-file: '{file}'\nallow-prefiller: [10.0.0.0/8]");
    let sidecar = TestSidecar::with(&d, &yaml).await;
    assert_eq!(sidecar.complete(&named(&p)).await.status, 403);
    assert_eq!(p.connections(), 0);
}

#[tokio::test]
async fn the_decode_engine_gets_the_secret_if_it_is_named() {
    let (_folder, file) = secret_file();
    let (p, d) =
        (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::Whole(1)).await);
    let yaml = format!("cluster-secret-file: '{file}'\ncluster-secret-stages: [decoder]");
    let sidecar = TestSidecar::with(&d, &yaml).await;
    assert_eq!(sidecar.complete(&named(&p)).await.status, 200);
    assert_eq!(d.received().len(), 1);
    assert!(secrets(&d).iter().all(|secret| secret.as_deref() == Some(SECRET)), "{:?}", secrets(&d));
    assert_eq!(p.received().len(), 1);
    assert!(secrets(&p).iter().all(Option::is_none), "without a list every address may be named");
}

#[tokio::test]
async fn a_rotated_secret_reaches_engines_that_are_known_already() {
    let (_folder, file) = secret_file();
    let (p, d) =
        (FakeEngine::always(Action::Lease(Some(7))).await, FakeEngine::always(Action::Whole(1)).await);
    let yaml = format!(
        "cluster-secret-file: '{file}'\nallow-prefiller: [127.0.0.1]\ncluster-secret-stages: [prefiller, decoder]"
    );
    let sidecar = TestSidecar::with(&d, &yaml).await;
    assert_eq!(sidecar.complete(&named(&p)).await.status, 200);
    std::fs::write(&file, format!("{NEXT_SECRET}\n")).unwrap();
    let is_next = |engine: &FakeEngine| secrets(engine).last() == Some(&Some(NEXT_SECRET.to_owned()));
    let rotated = async {
        while !(is_next(&p) && is_next(&d)) {
            assert_eq!(sidecar.complete(&named(&p)).await.status, 200);
        }
    };
    tokio::time::timeout(Duration::from_secs(10), rotated).await.expect("the file is read again");
    // A file that is gone changes nothing.
    std::fs::remove_file(&file).unwrap();
    assert_eq!(sidecar.complete(&named(&p)).await.status, 200);
    assert!(is_next(&p) && is_next(&d));
}
