//! Golden frames on small and wide terminals. `BATON_BLESS=1` writes them.

use std::collections::BTreeMap;

use baton_router::snapshot::{
    BlockCounts, EngineView, LeaseView, RequestState, RequestView, RouterView, SnapshotSource, Timeline,
    TimelineEntry,
};
use ratatui::Terminal;
use ratatui::backend::TestBackend;

use super::super::app::Key;
use super::*;
use crate::ops::top::merge::merge;

#[path = "picture.rs"]
mod picture;

fn drawn(app: &App, width: u16, height: u16, theme: Theme) -> (String, ratatui::buffer::Buffer) {
    let Ok(mut terminal) = Terminal::new(TestBackend::new(width, height));
    let Ok(_) = terminal.draw(|frame| draw(frame, app, theme));
    let buffer = terminal.backend().buffer().clone();
    let row = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
    ((0..height).map(row).collect::<Vec<_>>().join("\n") + "\n", buffer)
}

/// Compares with the golden frame of this name.
fn looks_like(name: &str, app: &App, width: u16, height: u16) {
    let (frame, _) = drawn(app, width, height, Theme::Plain);
    let file = format!("{}/src/ops/top/view/golden/{name}.txt", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("BATON_BLESS").is_some() {
        std::fs::write(&file, &frame).expect("the golden frame can be written");
    }
    let golden = std::fs::read_to_string(&file).expect("there is a golden frame");
    assert!(frame == golden, "{name}: expected\n{golden}\nand it is\n{frame}");
}

/// Draws the picture of the documentation again and compares it.
#[test]
fn the_documented_picture_matches_the_frame_of_a_storm() {
    let (_, frame) = drawn(&app(), 100, 34, Theme::Colours);
    let picture =
        picture::picture(&frame, "baton top: blocks by state, leases and requests in a storm of cancels");
    let file = format!("{}/../docs/assets/top.svg", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("BATON_BLESS").is_some() {
        std::fs::write(&file, &picture).expect("the picture can be written");
    }
    let there = std::fs::read_to_string(&file).unwrap_or_default();
    assert!(there == picture, "BATON_BLESS=1 draws docs/assets/top.svg again");
}

fn engine(name: &str, role: &str) -> EngineView {
    EngineView {
        engine: name.to_owned(),
        role: role.to_owned(),
        model: Some("baton-demo".to_owned()),
        epoch: Some("e1".to_owned()),
        source: SnapshotSource::DebugKv,
        standing: BTreeMap::from([(role.to_owned(), "usable".to_owned())]),
        leases: Some(0),
        ..EngineView::default()
    }
}

/// A deployment with stranded blocks, a draining lease and an engine that does not respond.
fn storm() -> Snapshot {
    let blocks = BlockCounts {
        total: 1000,
        free: 500,
        cached: 200,
        active: 180,
        leased: 90,
        landing: 30,
        ..BlockCounts::default()
    };
    let p = EngineView {
        kv_usage: Some(0.3),
        blocks: Some(blocks.clone()),
        leases: Some(4),
        requests: BTreeMap::from([("running".to_owned(), 3), ("waiting".to_owned(), 12)]),
        releases: BTreeMap::from([("transfer_done".to_owned(), 1200), ("lease_expired".to_owned(), 2)]),
        ..engine("10.0.0.1:8100", "prefill")
    };
    let d = EngineView {
        kv_usage: Some(0.12),
        blocks: Some(BlockCounts { leased: 0, landing: 12, active: 108, free: 880, cached: 0, ..blocks }),
        standing: BTreeMap::from([("decode".to_owned(), "draining".to_owned())]),
        ..engine("10.0.0.2:8100", "decode")
    };
    let stock = EngineView {
        source: SnapshotSource::Metrics,
        kv_usage: Some(0.5),
        blocks_total: Some(4000),
        leases: None,
        requests: BTreeMap::from([("running".to_owned(), 9)]),
        ..engine("vllm-0:8000", "decode")
    };
    let unresponsive = EngineView {
        source: SnapshotSource::None,
        error: Some("no answer within 1 s".to_owned()),
        leases: None,
        ..engine("10.0.0.3:8100", "prefill")
    };
    let lease = |id: &str, blocks: u64, state: &str, age_ms: u64, request: RequestState| LeaseView {
        engine: "10.0.0.1:8100".to_owned(),
        request_id: id.to_owned(),
        blocks,
        state: state.to_owned(),
        age_ms,
        left_ms: (state != "growing").then(|| 30_000 - age_ms),
        readers_expected: 1,
        request,
        ..LeaseView::default()
    };
    let flying = |phase: &str| RequestState::InFlight { phase: phase.to_owned() };
    let gone = RequestState::Over { outcome: "client_gone".to_owned(), ms_ago: 12_300 };
    let mut snapshot = Snapshot {
        at_us: 1_763_812_345_000_000,
        routers: vec![RouterView {
            admin: "127.0.0.1:8081".to_owned(),
            version: "0.1.0".to_owned(),
            generation: 1,
            in_flight: 21,
            ..RouterView::default()
        }],
        engines: vec![p, d, stock, unresponsive],
        leases: vec![
            lease("5b1c6e0a-7d43-4f0e-9a55-0c6d1e2f3a4b", 32, "offered", 14_200, gone.clone()),
            lease("9e8d7c6b-5a49-4838-8716-051423324150", 16, "draining", 9_100, gone),
            lease("00112233-4455-4677-8899-aabbccddeeff", 8, "reading", 350, flying("decode_pre_first")),
            lease("ffeeddcc-bbaa-4988-8766-554433221100", 34, "growing", 40, flying("prefill")),
        ],
        ..Snapshot::default()
    };
    snapshot.requests.in_flight = 21;
    snapshot.requests.phases = BTreeMap::from([
        ("queue".to_owned(), 2),
        ("prefill".to_owned(), 6),
        ("decode_stream".to_owned(), 12),
        ("gap".to_owned(), 1),
    ]);
    snapshot.requests.oldest = vec![RequestView {
        request_id: "00112233-4455-4677-8899-aabbccddeeff".to_owned(),
        model: Some("baton-demo".to_owned()),
        phase: "decode_pre_first".to_owned(),
        age_ms: 1_400,
        prefill_engine: Some("10.0.0.1:8100".to_owned()),
        decode_engine: Some("10.0.0.2:8100".to_owned()),
    }];
    snapshot.finish();
    snapshot
}

fn app() -> App {
    let mut app = App::new();
    let mut before = storm();
    before.at_us -= 2_000_000;
    before
        .engines
        .iter_mut()
        .for_each(|engine| engine.releases.values_mut().for_each(|n| *n -= (*n / 2).min(40)));
    app.take(merge(vec![before]));
    app.take(merge(vec![storm()]));
    app
}

#[test]
fn a_storm_on_terminals_of_every_size() {
    looks_like("storm-80x24", &app(), 80, 24);
    looks_like("storm-160x50", &app(), 160, 50);
    looks_like("storm-50x16", &app(), 50, 16);
    let app = app();
    for (width, height) in [(1, 1), (5, 2), (20, 3), (21, 4), (40, 9), (79, 11), (300, 100)] {
        drawn(&app, width, height, Theme::Colours);
    }
}

#[test]
fn requests_help_and_filters_are_drawn() {
    let mut app = app();
    app.key(Key::Tab);
    looks_like("requests-100x30", &app, 100, 30);
    app.key(Key::Tab);
    app.key(Key::Letter('/'));
    "strand".chars().for_each(|letter| drop(app.key(Key::Letter(letter))));
    looks_like("filter-80x24", &app, 80, 24);
    app.key(Key::Escape);
    app.key(Key::Letter('?'));
    looks_like("help-80x24", &app, 80, 24);
}

#[test]
fn a_frame_that_is_printed_has_room_for_what_is_wrong_with_an_engine() {
    let mut drained = engine("127.0.0.1:8200", "decode");
    drained.standing.insert("decode".to_owned(), "draining".to_owned());
    let mut app = App::new();
    app.take(Snapshot { engines: vec![engine("127.0.0.1:8100", "prefill"), drained], ..Snapshot::default() });
    // Includes the line of keys, which is not printed.
    let (frame, _) = drawn(&app, 100, rows(&app) + 1, Theme::Plain);
    assert!(frame.contains("decode: draining"), "{frame}");
}

#[test]
fn without_a_router_the_frame_shows_unknown() {
    let mut snapshot = storm();
    snapshot.routers.clear();
    snapshot.requests = baton_router::snapshot::RequestsView::default();
    snapshot.leases.iter_mut().for_each(|lease| lease.request = RequestState::Unknown);
    snapshot.finish();
    let mut app = App::new();
    app.take(snapshot);
    looks_like("engines-only-80x24", &app, 80, 24);
    let (empty, _) = drawn(&App::new(), 80, 24, Theme::Plain);
    assert!(empty.contains("loading"), "{empty}");
}

#[test]
fn a_request_is_shown_from_its_arrival_to_the_release_of_its_last_block() {
    let moment = |at_us, who: &str, kind: &str, text: &str| TimelineEntry {
        at_us,
        who: who.to_owned(),
        kind: kind.to_owned(),
        text: text.to_owned(),
    };
    let line = Timeline {
        request_id: "5b1c6e0a-7d43-4f0e-9a55-0c6d1e2f3a4b".to_owned(),
        client_id: Some("mine".to_owned()),
        model: Some("baton-demo".to_owned()),
        status: Some(499),
        outcome: Some("client_gone".to_owned()),
        took_us: Some(48_211),
        moments: vec![
            moment(0, "router", "arrived", ""),
            moment(118, "router", "choose", "decode: 10.0.0.2:8100 (least_load: least loaded)"),
            moment(420, "10.0.0.1:8100", "queued", "prefill, 512 prompt tokens"),
            moment(48_100, "10.0.0.1:8100", "lease_opened", "32 blocks, for 30.0 s"),
            moment(48_211, "router", "over", "499 client gone"),
            moment(
                49_030,
                "10.0.0.1:8100",
                "lease_ended",
                "client gone after 0.9 ms, 0 of 1 readers, 32 blocks",
            ),
            moment(49_044, "10.0.0.1:8100", "freed", "32 blocks"),
        ],
        notes: vec!["10.0.0.2:8100: it has no event log".to_owned()],
        ..Timeline::default()
    };
    let mut app = app();
    app.key(Key::Enter);
    let (asking, _) = drawn(&app, 80, 24, Theme::Plain);
    assert!(asking.contains("loading from the router"), "{asking}");
    app.take_timeline("5b1c6e0a-7d43-4f0e-9a55-0c6d1e2f3a4b", Ok(line));
    looks_like("timeline-100x16", &app, 100, 16);
    app.key(Key::Letter('j'));
    let (moved, _) = drawn(&app, 100, 16, Theme::Plain);
    assert!(!moved.contains("arrived") && moved.contains("choose"), "{moved}");
}

#[test]
fn hostile_names_do_not_reach_the_terminal() {
    let hostile = "\u{1b}]0;x\u{7}\u{1b}[2J\u{202e}\u{9b}1m\r\n\u{200b}";
    let mut snapshot = storm();
    for engine in &mut snapshot.engines {
        hostile.clone_into(&mut engine.engine);
        hostile.clone_into(&mut engine.role);
        engine.error = Some(hostile.to_owned());
        engine.requests.insert(hostile.to_owned(), 3);
        engine.releases.insert(hostile.to_owned(), 3);
        engine.standing.insert(hostile.to_owned(), hostile.to_owned());
    }
    for lease in &mut snapshot.leases {
        (lease.request_id, lease.engine, lease.state) =
            (hostile.to_owned(), hostile.to_owned(), hostile.to_owned());
    }
    for request in &mut snapshot.requests.oldest {
        (request.request_id, request.phase) = (hostile.to_owned(), hostile.to_owned());
        request.model = Some(hostile.to_owned());
    }
    snapshot.routers[0].error = Some(hostile.to_owned());
    snapshot.finish();
    let mut app = App::new();
    app.take(snapshot);
    let mut looks = vec![drawn(&app, 120, 50, Theme::Colours).1, drawn(&app, 80, 24, Theme::Colours).1];
    app.key(Key::Tab);
    looks.push(drawn(&app, 120, 50, Theme::Colours).1);
    app.key(Key::Enter);
    let moments = vec![TimelineEntry {
        who: hostile.to_owned(),
        kind: hostile.to_owned(),
        text: hostile.to_owned(),
        at_us: 1,
    }];
    let line = Timeline {
        client_id: Some(hostile.to_owned()),
        moments,
        notes: vec![hostile.to_owned()],
        ..Timeline::default()
    };
    app.take_timeline(hostile, Ok(line));
    looks.push(drawn(&app, 120, 50, Theme::Colours).1);
    let seen: String =
        looks.iter().flat_map(|look| look.content().iter().map(|cell| cell.symbol())).collect();
    assert!(seen.contains('\u{fffd}'), "they are shown, made harmless");
    let obeyed = |letter: char| {
        letter.is_control() || matches!(letter, '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}')
    };
    assert!(!seen.chars().any(obeyed));
}

#[test]
fn without_colours_the_frame_is_plain_and_shows_stranded_blocks() {
    let (frame, plain) = drawn(&app(), 80, 24, Theme::Plain);
    assert!(plain.content().iter().all(|cell| cell.fg == Color::Reset && cell.bg == Color::Reset));
    assert!(frame.contains("STRANDED") && frame.contains('X'));
    let (_, coloured) = drawn(&app(), 80, 24, Theme::Colours);
    assert!(coloured.content().iter().any(|cell| cell.fg == Color::Indexed(196)));
    assert!(coloured.content().iter().all(|cell| cell.bg == Color::Reset), "whatever the terminal's own is");
}
