//! Tokens of issuers beside API keys.

use baton_router::{NewKey, Router, RouterConfig};
use serde_json::{Value, json};

use crate::harness::client::{Client, ClientResponse, DisconnectKind, completion, get};
use crate::harness::engine::{Action, FakeEngine};
use crate::harness::issuer::{IssuerAnswer, SigningKey, TestIssuer, base64url, now_s};
use crate::harness::system::TestRouter;

/// A router that accepts tokens of one issuer, and one key.
struct TokenRouter {
    issuer: TestIssuer,
    d: FakeEngine,
    system: TestRouter,
    key: NewKey,
}

/// `entry` are further keys of the issuer's entry, `auth` further lines of `auth`.
async fn with_issuer(issuer: TestIssuer, entry: &str, auth: &str) -> TokenRouter {
    let (d, key) = (FakeEngine::always(Action::Whole(1)).await, NewKey::make());
    let system = TestRouter::of(&yaml(&issuer, &d, &key, entry, auth)).await;
    TokenRouter { issuer, d, system, key }
}

fn yaml(issuer: &TestIssuer, d: &FakeEngine, key: &NewKey, entry: &str, auth: &str) -> String {
    format!(
        "listen: 127.0.0.1:0\nadmin: {{listen: '127.0.0.1:0'}}\nhealth: {{active: {{interval_ms: 0}}}}\nmodels:\n  - \
         name: m\n    decode: {{engines: [{{url: '{}'}}]}}\nauth:\n  keys: [{{id: a, hash: '{}', tenant: keyed}}]\n  \
         jwt:\n    - {{issuer: '{}', audience: baton, tenant_claim: org{entry}}}\n{auth}",
        d.url(),
        key.hash,
        issuer.name(),
    )
}

async fn standard(entry: &str, auth: &str) -> (TokenRouter, SigningKey) {
    let signing = SigningKey::new("k1");
    let issuer = TestIssuer::start(&[&signing], IssuerAnswer::Keys).await;
    let router = with_issuer(issuer, entry, auth).await;
    router.has_keys(1.0).await;
    (router, signing)
}

impl TokenRouter {
    async fn post(&self, header: &str) -> ClientResponse {
        let mut client = Client::connect(self.system.address).await;
        let body = completion(false).to_string();
        client.post_bytes("/v1/completions", &format!("{header}\r\n"), body.as_bytes()).await;
        client.answer().await
    }

    async fn bearer(&self, token: &str) -> ClientResponse {
        self.post(&format!("Authorization: Bearer {token}")).await
    }

    async fn refuses(&self, token: &str, reason: &str) {
        let series = format!("baton_router_unauthorized_total{{reason=\"{reason}\"}}");
        let (before, served) = (self.system.metric(&series).await, self.d.received().len());
        let answer = self.bearer(token).await;
        assert_eq!(
            (answer.status, answer.code()),
            (401, "invalid_api_key".to_owned()),
            "{reason}: {}",
            answer.text()
        );
        assert_eq!(answer.header("www-authenticate"), Some("Bearer error=\"invalid_token\""), "{reason}");
        assert!(!answer.text().contains(&token[..8]), "{reason}: {}", answer.text());
        self.system.counts(&series, before + 1.0).await;
        assert_eq!(self.d.received().len(), served, "{reason}");
    }

    async fn has_keys(&self, keys: f64) {
        self.system.counts("baton_router_jwks_keys", keys).await;
    }
}

#[tokio::test]
async fn a_token_is_accepted_beside_keys_and_reaches_no_engine() {
    let (router, signing) = standard("", "").await;
    let token = signing.sign(&router.issuer.claims());
    for header in [format!("Authorization: Bearer {token}"), format!("x-api-key: {token}")] {
        let answer = router.post(&header).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
    }
    assert_eq!(router.bearer(&router.key.key).await.status, 200);
    for request in router.d.received() {
        assert!(!format!("{:?} {}", request.headers, request.body).contains(&token));
    }
    router.system.counts("baton_router_tenant_requests_total{tenant=\"chat\"}", 2.0).await;
    router.system.counts("baton_router_tenant_requests_total{tenant=\"keyed\"}", 1.0).await;
    // The second request needed no check of the signature.
    router.system.counts("baton_router_jwt_checks_total{result=\"verified\"}", 1.0).await;
    router.system.counts("baton_router_jwt_checks_total{result=\"cached\"}", 1.0).await;
    assert_eq!(router.issuer.key_requests(), 1);
    let unknown = router.bearer("sk-baton-unknown").await;
    assert_eq!((unknown.status, unknown.header("www-authenticate")), (401, Some("Bearer")));
}

#[tokio::test]
async fn a_token_that_is_not_valid_here_is_refused_with_its_reason() {
    let (router, signing) = standard(", algorithms: [ES256, EdDSA]", "").await;
    let with = |field: &str, value: Value| {
        let mut claims = router.issuer.claims();
        claims[field] = value;
        signing.sign(&claims)
    };
    let now = now_s();
    for (token, reason) in [
        (with("exp", json!(now - 31)), "token_expired"),
        (with("exp", Value::Null), "token_claims"),
        (with("exp", json!("soon")), "token_claims"),
        (with("nbf", json!(now + 60)), "token_not_yet_valid"),
        (with("nbf", json!("x")), "token_claims"),
        (with("aud", json!("other")), "token_audience"),
        (with("aud", json!(["x", 7])), "token_audience"),
        (with("aud", Value::Null), "token_audience"),
        (with("iss", json!("https://other.test")), "token_issuer"),
        (with("iss", json!([router.issuer.name()])), "token_issuer"),
        (with("org", Value::Null), "token_claims"),
        (with("org", json!("a b")), "token_claims"),
    ] {
        router.refuses(&token, reason).await;
    }
    for accepted in
        [with("exp", json!(now - 20)), with("nbf", json!(now + 20)), with("aud", json!(["x", "baton"]))]
    {
        assert_eq!(router.bearer(&accepted).await.status, 200);
    }
}

#[tokio::test]
async fn a_forged_token_is_refused_whatever_its_header_says() {
    let (router, signing) = standard(", algorithms: [ES256, RS256]", "").await;
    let claims = router.issuer.claims();
    let good = signing.sign(&claims);
    let parts: Vec<_> = good.split('.').collect();
    let header = |header: Value| base64url(header.to_string().as_bytes());
    let own = SigningKey::new("k1");
    let embedded = json!({"alg": "ES256", "kid": "k1", "jwk": own.jwk(), "jku": "http://127.0.0.1:1/"});
    let mut altered = claims.clone();
    altered["org"] = "another".into();
    let altered = base64url(altered.to_string().as_bytes());
    let of = |alg: &str, kid: &str| header(json!({"alg": alg, "kid": kid}));
    for (token, reason) in [
        (own.sign(&claims), "token_signature"),
        (own.sign_with(&embedded, &claims), "token_signature"),
        (format!("{}.{altered}.{}", parts[0], parts[2]), "token_signature"),
        (format!("{}.{}.", parts[0], parts[1]), "token_signature"),
        (format!("{}.{}.", of("none", "k1"), parts[1]), "token_malformed"),
        (format!("{}.{}.{}", of("HS256", "k1"), parts[1], parts[2]), "token_algorithm"),
        (format!("{}.{}.{}", of("RS256", "k1"), parts[1], parts[2]), "token_algorithm"),
        (format!("{}.{}.{}", of("ES384", "k1"), parts[1], parts[2]), "token_algorithm"),
        (
            signing.sign_with(&json!({"alg": "ES256", "kid": "k1", "crit": ["exp"]}), &claims),
            "token_malformed",
        ),
        (format!("{}.{}.{}", parts[0], "x".repeat(17_000), parts[2]), "token_malformed"),
        ("aaaaaaaa.bbbb.cccc".to_owned(), "token_malformed"),
    ] {
        router.refuses(&token, reason).await;
    }
    assert_eq!(router.issuer.key_requests(), 1, "no forged token caused a fetch");
    // Without a key id, the issuer's only key is meant.
    assert_eq!(router.bearer(&signing.sign_with(&json!({"alg": "ES256"}), &claims)).await.status, 200);
}

#[tokio::test]
async fn a_rotated_key_is_fetched_once_and_a_withdrawn_one_ends() {
    let (router, old) = standard("", "").await;
    let mut claims = router.issuer.claims();
    // Tokens that are older than each fetch below.
    claims["iat"] = json!(now_s() - 60);
    let (first, second) = (SigningKey::new("k2"), SigningKey::new("k3"));
    assert_eq!(router.bearer(&old.sign(&claims)).await.status, 200);
    router.issuer.publish(&[&first]);
    // The client's first token with the new key waits for the fetch.
    assert_eq!(router.bearer(&first.sign(&claims)).await.status, 200);
    assert_eq!(router.issuer.key_requests(), 2);
    router.refuses(&old.sign(&claims), "token_key_id").await;
    // A flood of unknown key ids causes no further fetch within ten seconds, and none waits.
    router.issuer.publish(&[&second]);
    for n in 0..50 {
        let header = json!({"alg": "ES256", "kid": format!("random-{n}")});
        router.refuses(&second.sign_with(&header, &claims), "token_key_id").await;
    }
    assert_eq!(router.issuer.key_requests(), 2);
    assert_eq!(router.bearer(&first.sign(&claims)).await.status, 200);
}

#[tokio::test]
async fn a_token_gets_401_for_its_key_id_only_from_keys_that_are_newer() {
    let (router, _) = standard("", "").await;
    let claims = router.issuer.claims();
    let unavailable = async |token: &str| {
        let answer = router.bearer(token).await;
        assert_eq!((answer.status, answer.code()), (503, "unavailable".to_owned()), "{}", answer.text());
        let wait: u64 = answer.header("retry-after").unwrap().parse().unwrap();
        assert!((1..=10).contains(&wait), "{wait}");
    };
    let (forged, fresh) = (SigningKey::new("forged"), SigningKey::new("k2"));
    // The forged token's own fetch shows that its key does not exist, and begins the pause.
    router.refuses(&forged.sign(&claims), "token_key_id").await;
    assert_eq!(router.issuer.key_requests(), 2);
    // The issuer rotates its keys within the pause.
    router.issuer.publish(&[&fresh]);
    let unauthorized = router.system.metric("baton_router_unauthorized_total").await;
    for _ in 0..3 {
        unavailable(&fresh.sign(&claims)).await;
        unavailable(&forged.sign(&claims)).await;
    }
    let mut just_issued = claims.clone();
    just_issued["iat"] = json!(now_s());
    unavailable(&fresh.sign(&just_issued)).await;
    assert_eq!(router.system.metric("baton_router_unauthorized_total").await, unauthorized);
    router.system.counts("baton_router_jwt_checks_total{result=\"no_keys\"}", 7.0).await;
    assert_eq!(router.issuer.key_requests(), 2, "a forged token causes no further fetch");
    // A token from before the fetch would have its key among the fetched ones.
    let mut old = claims.clone();
    old["iat"] = json!(now_s() - 60);
    router.refuses(&forged.sign(&old), "token_key_id").await;
    assert!(router.d.received().is_empty());
}

#[tokio::test]
async fn a_token_without_a_key_id_is_refused_if_its_issuer_has_several_keys() {
    let keys = [SigningKey::new("k1"), SigningKey::new("k2")];
    let issuer = TestIssuer::start(&[&keys[0], &keys[1]], IssuerAnswer::Keys).await;
    let router = with_issuer(issuer, "", "").await;
    router.has_keys(2.0).await;
    let token = keys[0].sign_with(&json!({"alg": "ES256"}), &router.issuer.claims());
    // The first one causes a fetch, and the second one comes within the pause.
    for _ in 0..2 {
        router.refuses(&token, "token_key_id").await;
    }
    assert_eq!(router.issuer.key_requests(), 2);
}

#[tokio::test]
async fn a_token_with_an_unknown_key_id_gets_503_if_the_fetch_fails() {
    let (router, known) = standard("", "").await;
    router.issuer.answers(IssuerAnswer::Text(500, String::new()));
    let fresh = SigningKey::new("k2");
    let answer = router.bearer(&fresh.sign(&router.issuer.claims())).await;
    assert_eq!((answer.status, answer.code()), (503, "unavailable".to_owned()), "{}", answer.text());
    assert!(answer.header("retry-after").is_some());
    assert_eq!(router.bearer(&known.sign(&router.issuer.claims())).await.status, 200);
}

#[tokio::test]
async fn without_an_issuers_keys_its_tokens_get_503_and_keys_still_work() {
    let signing = SigningKey::new("k1");
    let huge = format!("{{\"keys\": [], \"x\": \"{}\"}}", "x".repeat(300_000));
    for broken in [
        IssuerAnswer::Text(500, String::new()),
        IssuerAnswer::Text(200, "<html>".into()),
        IssuerAnswer::Text(
            200,
            "{\"issuer\": \"https://other.test\", \"jwks_uri\": \"https://other.test/\"}".into(),
        ),
        IssuerAnswer::Text(200, huge),
    ] {
        let issuer = TestIssuer::start(&[&signing], broken.clone()).await;
        let router = with_issuer(issuer, "", "").await;
        let series = "baton_router_jwks_fetches_total{result=\"failed\"}";
        eventually_async(async || router.system.metric(series).await >= 1.0).await;
        let token = signing.sign(&router.issuer.claims());
        let answer = router.bearer(&token).await;
        assert_eq!((answer.status, answer.code()), (503, "unavailable".to_owned()), "{broken:?}");
        assert!(answer.header("retry-after").is_some());
        assert_eq!(router.bearer(&router.key.key).await.status, 200);
        assert_eq!(get(router.system.address, "/ready").await.status, 200);
        router.issuer.answers(IssuerAnswer::Keys);
        router.has_keys(1.0).await;
        assert_eq!(router.bearer(&token).await.status, 200);
    }
}

async fn eventually_async(mut holds: impl AsyncFnMut() -> bool) {
    let begun = std::time::Instant::now();
    while !holds().await {
        assert!(begun.elapsed().as_secs() < 10, "not within 10 s");
        tokio::task::yield_now().await;
    }
}

#[tokio::test]
async fn tokens_of_an_issuer_that_hangs_wait_for_a_bounded_time_and_in_bounded_number() {
    let signing = SigningKey::new("k1");
    let issuer = TestIssuer::start(&[&signing], IssuerAnswer::Hang).await;
    let router = with_issuer(issuer, "", "").await;
    let token = signing.sign(&router.issuer.claims());
    let answers = (0..300).map(|_| router.bearer(&token));
    let answers = futures::future::join_all(answers).await;
    assert!(answers.iter().all(|answer| answer.status == 503));
}

#[tokio::test]
async fn a_client_that_leaves_while_its_issuer_hangs_is_noticed_at_once() {
    let signing = SigningKey::new("k1");
    let issuer = TestIssuer::start(&[&signing], IssuerAnswer::Hang).await;
    let router = with_issuer(issuer, "", "").await;
    let header = format!("Authorization: Bearer {}\r\n", signing.sign(&router.issuer.claims()));
    // The second body is longer than what is read of it meanwhile.
    for (n, bytes) in [(1.0, 5), (2.0, 40_000)] {
        let mut body = completion(false);
        body["prompt"] = json!("x".repeat(bytes));
        let mut client = Client::connect(router.system.address).await;
        client.post_bytes("/v1/completions", &header, body.to_string().as_bytes()).await;
        client.hang_up(DisconnectKind::Fin);
        router.system.counts("baton_router_disconnects_total{phase=\"queue\"}", n).await;
    }
    router.system.settled().await;
    router.system.counts("baton_router_jwt_checks_total", 0.0).await;
}

#[tokio::test]
async fn claims_grant_models_priority_and_limits_of_a_tenant() {
    let entry = ", tenant_prefix: 'idp:', models_claim: models, limits: {requests_per_minute: 2}";
    let auth = "  tenants: [{name: 'idp:listed', limits: {requests_per_minute: 1}}]\n";
    let (router, signing) = standard(entry, auth).await;
    let token = |org: &str, models: Value| {
        let mut claims = router.issuer.claims();
        (claims["org"], claims["models"]) = (org.into(), models);
        signing.sign(&claims)
    };
    router.refuses(&token("a", Value::Null), "token_claims").await;
    let forbidden = router.bearer(&token("a", json!(["other"]))).await;
    assert_eq!((forbidden.status, forbidden.code()), (403, "model_not_allowed".to_owned()));
    for (org, statuses) in [("b", [200, 200, 429]), ("listed", [200, 429, 429])] {
        for (n, status) in statuses.into_iter().enumerate() {
            // Another token of the same tenant has no limits of its own.
            let models = if n == 1 { json!("m x") } else { json!(["m"]) };
            let answer = router.bearer(&token(org, models)).await;
            assert_eq!(answer.status, status, "{org} {n}: {}", answer.text());
        }
    }
    router.system.counts("baton_router_tenant_requests_total{tenant=\"idp:b\"}", 2.0).await;
}

#[tokio::test]
async fn a_listed_tenant_has_its_label_whatever_tenants_tokens_name() {
    let (router, signing) = standard("", "  tenants: [{name: listed}]\n").await;
    let post = async |org: String| {
        let mut claims = router.issuer.claims();
        claims["org"] = org.into();
        assert_eq!(router.bearer(&signing.sign(&claims)).await.status, 200);
    };
    for n in 0..100 {
        post(format!("t{n}")).await;
    }
    let series = |tenant: &str| format!("baton_router_tenant_requests_total{{tenant=\"{tenant}\"}}");
    // Two labels are reserved: of the listed tenant, and of the key's.
    router.system.counts(&series("other"), 2.0).await;
    post("listed".to_owned()).await;
    router.system.counts(&series("listed"), 1.0).await;
    post("late".to_owned()).await;
    router.system.counts(&series("other"), 3.0).await;
    let next =
        yaml(&router.issuer, &router.d, &router.key, "", "  tenants: [{name: listed}, {name: late}]\n");
    router.system.reload.install(RouterConfig::from_yaml(&next, "t").unwrap()).unwrap();
    post("late".to_owned()).await;
    router.system.counts(&series("late"), 1.0).await;
    router.system.counts(&series("other"), 3.0).await;
}

#[tokio::test]
async fn two_tenants_of_tokens_have_two_cache_salts() {
    let (router, signing) = standard("", "").await;
    for org in ["x", "y", "x"] {
        let mut claims = router.issuer.claims();
        claims["org"] = org.into();
        assert_eq!(router.bearer(&signing.sign(&claims)).await.status, 200);
    }
    let salts: Vec<_> =
        router.d.received().into_iter().map(|request| request.body["cache_salt"].clone()).collect();
    assert!(salts[0] == salts[2] && salts[0] != salts[1] && salts[0].is_string(), "{salts:?}");
}

#[tokio::test]
async fn a_reload_keeps_the_keys_of_an_issuer_and_the_use_of_a_tenant() {
    let (router, signing) = standard(", limits: {requests_per_minute: 1}", "").await;
    let token = signing.sign(&router.issuer.claims());
    assert_eq!(router.bearer(&token).await.status, 200);
    router.issuer.answers(IssuerAnswer::Hang);
    let entry = ", limits: {requests_per_minute: 1}, leeway_s: 5";
    let next = yaml(&router.issuer, &router.d, &router.key, entry, "");
    router.system.reload.install(RouterConfig::from_yaml(&next, "t").unwrap()).unwrap();
    assert_eq!(
        router.bearer(&token).await.status,
        429,
        "without another fetch, and the bucket is still empty"
    );
    assert_eq!(router.issuer.key_requests(), 1);
}

#[tokio::test]
async fn keys_may_come_from_a_file_which_must_be_valid() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.json");
    let signing = SigningKey::new("k1");
    std::fs::write(&file, json!({"keys": [signing.jwk()]}).to_string()).unwrap();
    let issuer = TestIssuer::start(&[], IssuerAnswer::Hang).await;
    let entry = format!(", jwks_file: '{}'", file.display());
    let router = with_issuer(issuer, &entry, "").await;
    assert_eq!(router.bearer(&signing.sign(&router.issuer.claims())).await.status, 200);
    router.refuses(&SigningKey::new("k2").sign(&router.issuer.claims()), "token_key_id").await;
    std::fs::write(&file, "{}").unwrap();
    let config = yaml(&router.issuer, &router.d, &router.key, &entry, "");
    let refused = Router::bind(RouterConfig::from_yaml(&config, "t").unwrap()).await.err().unwrap();
    assert!(refused.to_string().contains("not a JSON Web Key Set"), "{refused}");
    assert_eq!(router.issuer.key_requests(), 0);
}
