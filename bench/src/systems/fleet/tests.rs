//! A small fleet: everything is settled, a seed determines a run, and deliberate faults are detected.

use serde_json::Value;

use super::{FleetError, FleetOptions, PlantedFault, run, run_with};

fn options() -> FleetOptions {
    FleetOptions {
        engines: vec![8, 24],
        requests: 400,
        turnover: 3.0,
        policy: ["least_load", "prefix_aware"].map(str::to_owned).to_vec(),
        routers: 1,
        max_in_flight: None,
        max_waiting: None,
        engine_capacity: None,
        no_explain: false,
        seed: 7,
        json: true,
    }
}

fn report(options: &FleetOptions) -> Value {
    let mut out = Vec::new();
    run(options, &mut out).expect("everything is settled");
    serde_json::from_slice(&out).expect("one JSON object")
}

#[test]
fn a_small_fleet_settles_every_lease_by_every_close_cause() {
    let all = ["round_robin", "random", "power_of_two", "least_load", "consistent_hash", "prefix_aware"];
    let options = FleetOptions { policy: all.map(str::to_owned).to_vec(), ..options() };
    let report = report(&options);
    let runs = report["runs"].as_array().expect("runs");
    assert_eq!(runs.len(), 12);
    let (mut fetched, mut expired, mut died, mut left) = (0, 0, 0, 0);
    for run in runs {
        let lease = |name: &str| run["leases"][name].as_u64().expect(name);
        let ended = ["fetched", "released", "expired", "lost_with_engine"].map(lease);
        assert_eq!(lease("opened"), ended.iter().sum::<u64>(), "{run}");
        let faults = run["faults"].as_object().expect("faults");
        assert!(faults.len() == 7 && faults.values().all(|count| count == 0), "{run}");
        let endings: u64 =
            run["endings"].as_object().expect("endings").values().filter_map(Value::as_u64).sum();
        assert_eq!(endings, run["begun"].as_u64().expect("begun"));
        fetched += lease("fetched");
        expired += lease("expired");
        died += run["engines_died"].as_u64().expect("engines_died");
        left += run["endings"]["client_gone"].as_u64().expect("client_gone");
    }
    // Of 19,200 requests most are fetched. Half a percent of leases is not renewed, and a tenth of clients
    // disconnects.
    assert!(fetched > 12_000 && expired > 20 && died > 50 && left > 800, "{fetched} {expired} {died} {left}");
}

#[test]
fn a_run_follows_from_its_seed() {
    let digests = |seed| {
        let report = report(&FleetOptions { seed, ..options() });
        let runs = report["runs"].as_array().expect("runs");
        runs.iter().map(|run| run["digest"].as_str().expect("a digest").to_owned()).collect::<Vec<_>>()
    };
    let once = digests(3);
    assert_eq!(once, digests(3));
    assert!(once.iter().zip(digests(4)).all(|(a, b)| *a != b));
}

#[test]
fn the_report_contains_every_documented_number() {
    let report = report(&options());
    for key in ["date", "machine", "requests", "turnover", "routers", "explain", "seed", "clock_ns"] {
        assert!(!report[key].is_null(), "{key}");
    }
    for key in ["policy", "engines", "bytes_per_engine", "bytes_per_request"] {
        assert!(!report["memory"][key].is_null(), "memory.{key}");
    }
    for run in report["runs"].as_array().expect("runs") {
        for kind in ["choose_decode", "choose_prefill", "finish", "lease"] {
            for key in ["count", "mean_ns", "p50_ns", "p99_ns"] {
                assert!(run["costs"][kind][key].as_f64().is_some_and(|number| number > 0.0), "{kind}.{key}");
            }
        }
        for leg in ["prefill", "decode"] {
            let mean = run["imbalance"][leg]["mean"].as_f64().expect("a number");
            assert!(mean >= 1.0 && mean <= run["imbalance"][leg]["worst"].as_f64().expect("a number"));
            assert!(run["most_at_one"][leg].as_u64().is_some_and(|most| most > 0));
        }
        assert!(run["prefix_hit_share"].as_f64().is_some_and(|share| (0.0..=1.0).contains(&share)));
        assert_eq!(run["refused_share"], 0.0);
    }
    let growth = report["growth"].as_array().expect("growth");
    assert_eq!(growth.len(), 4);
    for of in growth.iter().filter(|of| of["engines"] == 8) {
        assert_eq!((&of["finish"]["p50"], &of["lease"]["mean"]), (&Value::from(1.0), &Value::from(1.0)));
    }
}

#[test]
fn planted_faults_are_found() {
    for (plant, name) in [
        (PlantedFault::DroppedRelease, "stranded_leases 1"),
        (PlantedFault::KeptBlocks, "blocks_left"),
        (PlantedFault::FreedTwice, "freed_twice"),
    ] {
        let options = FleetOptions { engines: vec![8], policy: vec!["least_load".to_owned()], ..options() };
        match run_with(&options, Some(plant), &mut Vec::new()) {
            Err(FleetError::Faults(faults)) => assert!(faults.contains(name), "{plant:?}: {faults}"),
            other => panic!("{plant:?} was not found: {other:?}"),
        }
    }
}

#[test]
fn full_engines_refuse_and_independent_routers_over_admit() {
    let full = |routers, most, max_waiting| {
        let policy = vec!["least_load".to_owned()];
        let (max_in_flight, room) = (Some(most), Some(60));
        let options = FleetOptions {
            engines: vec![8],
            policy,
            routers,
            max_in_flight,
            max_waiting,
            engine_capacity: room,
            turnover: 20.0,
            ..options()
        };
        report(&options)["runs"][0].clone()
    };
    let room = |run: &Value, name: &str| run["room"][name].as_f64().expect("a number");
    let (one, three) = (full(1, 60, None), full(3, 60, None));
    // 4 decode engines have capacity for 240 of 400 clients. Three routers fill the capacity three times.
    assert!(one["refused_share"].as_f64().is_some_and(|share| share > 0.1), "{one}");
    assert_eq!(one["most_at_one"]["decode"], 60);
    assert!(three["most_at_one"]["decode"].as_u64().is_some_and(|most| most > 60 && most <= 180), "{three}");
    assert!(room(&one, "busiest") == 1.0 && room(&one, "over_share") == 0.0, "{one}");
    assert!(room(&one, "turned_away_share") > 0.2 && room(&one, "free_share") < 0.2, "{one}");
    assert!(room(&three, "busiest") > 1.2 && room(&three, "over_share") > 0.5, "{three}");
    assert!(room(&three, "turned_away_share") < room(&one, "turned_away_share") / 2.0, "{three}");
    // The shares of capacity add up to 1.
    let shares = full(3, 20, None);
    assert!(room(&shares, "busiest") == 1.0 && room(&shares, "turned_away_share") > 0.2, "{shares}");
    // Reported waiting requests limit routers that do not know of each other.
    let informed = full(3, 60, Some(1));
    assert!(room(&informed, "waiting_share") < room(&three, "waiting_share"), "{informed} {three}");
    assert!(room(&informed, "turned_away_share") > room(&three, "turned_away_share"), "{informed} {three}");
}

#[test]
fn invalid_options_are_refused_before_the_run() {
    for wrong in [
        FleetOptions { engines: vec![3], ..options() },
        FleetOptions { engines: vec![], ..options() },
        FleetOptions { requests: 0, ..options() },
        FleetOptions { requests: 400_001, ..options() },
        FleetOptions { turnover: f64::NAN, ..options() },
        FleetOptions { routers: 0, ..options() },
        FleetOptions { max_in_flight: Some(0), ..options() },
        FleetOptions { engine_capacity: Some(0), ..options() },
        FleetOptions { max_waiting: Some(1), ..options() },
    ] {
        let refused = run(&wrong, &mut Vec::new());
        assert!(matches!(refused, Err(FleetError::Options(_))), "{wrong:?}");
    }
    let unknown = FleetOptions { policy: vec!["fastest".to_owned()], ..options() };
    let refused = run(&unknown, &mut Vec::new());
    assert!(refused.is_err_and(|error| error.to_string().contains("fastest")));
}
