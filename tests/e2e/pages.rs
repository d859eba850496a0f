//! The commands of README and tutorials, run as written against a `baton up`, with its ports.

use std::path::Path;
use std::process::{Command, Output};

use crate::up::UpProcess;

/// Blocks that do not run here, by a word of the block, and the reason.
const NOT_RUN: [(&str, &str); 7] = [
    ("cargo run", "the binary under test is this build"),
    ("export PATH", "the test sets PATH"),
    ("vllm serve", "needs vLLM: tests/peers/vllm.sh"),
    ("router.yaml", "needs vLLM; `every_router_configuration_in_a_page_passes_check` checks the file"),
    ("hf download", "needs the network"),
    ("baton engine", "fixed ports; tests/e2e and tests/deploy start such processes"),
    ("baton up --model engine/models/tools", "the test starts it on free ports"),
];
/// Required output of a block, by a word of the block.
const ANSWERS: [(&str, &str); 4] = [
    ("\"stream\":true,\"stream_options\"", "data: [DONE]"),
    ("/v1/chat/completions", "The red box holds a key."),
    ("baton explain", "client_gone"),
    ("baton doctor", "healthy"),
];

/// The same, for the tutorial on agents.
const ANSWERS_WITH_TOOLS: [(&str, &str); 3] = [
    ("\"stream\": true", "data: [DONE]"),
    ("\"role\": \"tool\"", "The weather in Paris is 21 degrees and sunny."),
    ("/v1/chat/completions", "\"arguments\":\"{\\\"city\\\": \\\"Paris\\\"}\""),
];

/// The shell blocks of a page.
fn blocks(page: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(page);
    let text = std::fs::read_to_string(path).expect("the page is there");
    let blocks = text.split("```sh\n").skip(1).filter_map(|rest| rest.split_once("```"));
    blocks.map(|(block, _)| block.to_owned()).collect()
}

/// Runs a script. `None` without bash.
fn shell(script: &str) -> Option<Output> {
    Command::new("bash").args(["-c", script]).output().ok()
}

/// Whether the blocks can run here.
fn has_curl() -> bool {
    let has = shell("command -v curl").is_some_and(|found| found.status.success());
    if !has {
        println!("SKIPPED: bash or curl is not installed (commands of README and tutorials were not run)");
    }
    has
}

/// Runs the shell blocks of a page against this `baton up`. Returns their number.
fn run_blocks(page: &str, (client, admin): &(String, String), answers: &[(&str, &str)]) -> usize {
    let folder = Path::new(env!("CARGO_BIN_EXE_baton")).parent().expect("the binary is in a folder");
    let mut run = 0;
    for block in blocks(page) {
        if NOT_RUN.iter().any(|(word, _)| block.contains(word)) || block.contains("baton top") {
            continue;
        }
        let here = block.replace("127.0.0.1:8000", client).replace("127.0.0.1:8081", admin);
        // `baton explain` uses the default port.
        let here = here.replace("baton explain ", &format!("baton explain --admin http://{admin} "));
        let path = format!("export PATH='{}':\"$PATH\"\n{here}", folder.display());
        let output = shell(&path).expect("bash runs");
        let printed = String::from_utf8_lossy(&output.stdout);
        let wanted = answers.iter().find(|(word, _)| block.contains(word)).map(|(_, answer)| answer);
        let wanted = wanted.unwrap_or_else(|| panic!("{page}: nothing is expected of\n{block}"));
        let log = String::from_utf8_lossy(&output.stderr);
        assert!(printed.contains(wanted), "{page}:\n{block}\n{printed}\n{log}");
        run += 1;
    }
    run
}

#[test]
fn the_commands_of_readme_and_tutorial_work_as_documented() {
    if !has_curl() {
        return;
    }
    let up = UpProcess::start();
    let addresses = up.addresses();
    let pages = ["README.md", "docs/tutorial/first-request.md"];
    let run: usize = pages.iter().map(|page| run_blocks(page, &addresses, &ANSWERS)).sum();
    assert!(run >= 5, "only {run} blocks were run");
}

#[test]
fn the_commands_of_the_tutorial_on_agents_work_as_documented() {
    if !has_curl() {
        return;
    }
    let up = UpProcess::serving(&Path::new(env!("CARGO_MANIFEST_DIR")).join("engine/models/tools"));
    let run = run_blocks("docs/tutorial/agents.md", &up.addresses(), &ANSWERS_WITH_TOOLS);
    assert_eq!(run, 3);
}
