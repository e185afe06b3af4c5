use std::path::{Path, PathBuf};

use model::{CONFIG_FILE, STATE_DIR};

use super::{
    super::{Command, key::KeyCommand, parse},
    earlier::FlagText,
    layers::Layers,
    *,
};

/// A directory with a configuration file.
fn written(name: &str, text: &str) -> (tempfile::TempDir, PathBuf) {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join(name);
    std::fs::write(&path, text).unwrap();
    (dir, path)
}

fn args(words: &[&str]) -> ServeArgs {
    let words = ["cube-api", "serve"].iter().chain(words);
    match parse(words.map(Into::into)).unwrap() {
        Command::Serve(args) => *args,
        _ => panic!("not serve"),
    }
}

/// All mistakes in a configuration file, without its directory.
fn mistakes(text: &str) -> String {
    let (dir, path) = written("cube.toml", text);
    let loaded = args(&["--config", path.to_str().unwrap()]).load();
    let why = loaded.map(drop).unwrap_err().to_string();
    why.replace(&format!("{}/", dir.path().display()), "")
}

#[test]
fn an_unknown_key_names_its_line_and_the_nearest_key() {
    assert_eq!(
        mistakes("[pool]\nmax_saved = 5\ntempaltes = \"/x\"\n"),
        "cube.toml:3: unknown key `tempaltes` in [pool]: did you mean `templates`?"
    );
    assert_eq!(
        mistakes("[pool]\ndomain = \"x\"\n"),
        "cube.toml:2: unknown key `domain` in [pool]: it belongs in [server]"
    );
    assert_eq!(
        mistakes("[pol]\nx = 1\n"),
        "cube.toml:1: unknown section [pol]: did you mean [pool]?"
    );
    assert_eq!(
        mistakes("rate = 5\n"),
        "cube.toml:1: `rate` is not in a section: write it below [server]"
    );
}

#[test]
fn all_mistakes_are_reported_at_once_each_with_its_place_and_cure() {
    let text = "[server]\nlisten = \"127.0.0.1:1\"\nmemory = \"63MiB\"\n[pool]\nwarm = \"4:2\"\nrate = 5\n\
                [sandbox]\ncpu_weight = 0\nmax_timeout = \"1 week of\"\n[network]\nmode = \"off\"\n";
    let found = mistakes(text);
    let lines: Vec<_> = found.lines().map(str::trim).collect();
    assert_eq!(lines[0], "7 mistakes in the configuration:", "{found}");
    for (line, parts) in [
        (2, ["server.listen", "write it like `listen = ["]),
        (3, ["server.memory", "use 64MiB or more"]),
        (5, ["pool.warm", "write it like 2:4"]),
        (
            6,
            ["unknown key `rate` in [pool]", "it belongs in [server]"],
        ),
        (8, ["sandbox.cpu_weight", "from 1 to 10000"]),
        (9, ["sandbox.max_timeout", "24h"]),
        (11, ["network.mode", "`isolated`"]),
    ] {
        let start = format!("cube.toml:{line}: ");
        let mistake = lines.iter().find(|mistake| mistake.starts_with(&start));
        let mistake = mistake.unwrap_or_else(|| panic!("{line}: {found}"));
        assert!(parts.iter().all(|part| mistake.contains(part)), "{mistake}");
    }
    let syntax = mistakes("[server]\nrate = 5 5\n\n[pool]\nwarm 2:4\n");
    assert!(
        syntax.contains("cube.toml:2: ") && syntax.contains("cube.toml:5: "),
        "{syntax}"
    );
}

#[test]
fn an_option_overrides_the_file_and_the_file_overrides_the_default() {
    let (_dir, path) = written(
        "cube.toml",
        "[server]\nrate = 5\nstate = \"/f\"\nlisten = [\"127.0.0.1:1\"]\n[pool]\nmax_saved = 7\n",
    );
    let path = path.to_str().unwrap();
    let words = [
        "--config",
        path,
        "--state",
        "/s",
        "--set",
        "server.rate=6",
        "--listen",
        "[::1]:2",
    ];
    let (config, layers) = args(&words).load().unwrap();
    assert_eq!(config.server.state, Path::new("/s"));
    assert_eq!((config.server.rate, config.pool.max_saved), (6, 7));
    assert_eq!(config.server.listen, ["[::1]:2".parse().unwrap()]);
    assert_eq!(config.pool.max_sandboxes, 256);
    let source = |key: &str| {
        layers
            .setting(key)
            .map(|setting| setting.source.to_string())
    };
    assert_eq!(source("server.state").as_deref(), Some("--state"));
    assert_eq!(source("server.rate").as_deref(), Some("--set"));
    assert_eq!(source("pool.max_saved"), Some(format!("{path}:6")));
    assert_eq!(source("pool.max_sandboxes"), None);
    assert_eq!(layers.deprecation(), None);
}

#[test]
fn a_key_can_be_set_without_a_file() {
    let none = ["--config", "/dev/null"];
    let set = |texts: &[&str]| {
        let words: Vec<_> = texts.iter().flat_map(|text| ["--set", *text]).collect();
        let loaded = args(&[&none[..], &words[..]].concat()).load();
        loaded
            .map(|(config, _)| config)
            .map_err(|why| why.to_string())
    };
    let config = set(&[
        "cluster.node=42",
        "network.denied=0.0.0.0/0:25",
        "network.denied=10.0.0.1",
    ]);
    let config = config.unwrap();
    assert_eq!(config.cluster.node.unwrap().text, "42");
    assert_eq!(config.network.denied.len(), 2);
    let why = set(&["pool.max_sandboxes"]).unwrap_err();
    assert!(why.starts_with("--set: pool.max_sandboxes: "), "{why}");
    let why = set(&["max_sandboxes=1"]).unwrap_err();
    assert!(why.contains("SECTION.KEY=VALUE"), "{why}");
    let why = set(&["pool.warm=0:0", "pool.warm=1:1"]).unwrap_err();
    assert!(why.contains("already set"), "{why}");
}

#[test]
fn options_of_earlier_releases_set_their_keys_and_are_named_in_a_warning() {
    let words = [
        "--config",
        "/dev/null",
        "--warm",
        "0:3",
        "--insecure-loopback",
        "--egress-calls",
        "--uplink=a",
        "--uplink",
        "b",
    ];
    let (config, layers) = args(&words).load().unwrap();
    assert_eq!(config.pool.warm.unwrap().text, "0:3");
    assert!(config.egress.log_calls && config.server.insecure_loopback);
    assert_eq!(config.network.uplinks, ["a", "b"]);
    let warning = layers.deprecation().unwrap();
    for part in [
        "--warm (now pool.warm)",
        "--egress-calls (now egress.log_calls)",
        "--uplink (now network.uplinks)",
    ] {
        assert!(warning.contains(part), "{part}: {warning}");
    }
    assert!(!warning.contains("insecure"), "{warning}");
    let why = parse(["cube-api", "serve", "--warm"].map(Into::into))
        .map(drop)
        .unwrap_err();
    assert!(why.to_string().contains("--warm needs a value"), "{why}");
}

#[test]
fn every_option_of_an_earlier_release_names_a_key() {
    for (option, key) in earlier::OPTIONS {
        assert!(schema::default_of(key).is_some(), "{option}: {key}");
    }
}

#[test]
fn an_options_file_of_an_earlier_release_is_read_below_the_configuration_file() {
    let (dir, old) = written(
        "server.conf",
        "# comment\nmax-sandboxes = 64\nmax-saved = 9\ninsecure-loopback\nimage-mirror = a=http://b:1\nimage-mirror = c=http://d:1\n",
    );
    let new = dir.path().join("cube.toml");
    let load = |named: Option<&Path>| {
        let layers = Layers::load(named, &new, Vec::new());
        (layers.config().map_err(|why| why.to_string()), layers)
    };
    // A server that the previous package's unit started has the options file on its command line.
    for named in [None, Some(old.as_path())] {
        let _absent = std::fs::remove_file(&new);
        let (config, layers) = load(named);
        let config = config.unwrap();
        assert_eq!((config.pool.max_sandboxes, config.pool.max_saved), (64, 9));
        assert!(config.server.insecure_loopback);
        assert_eq!(config.images.mirrors.len(), 2);
        assert!(layers.deprecation().unwrap().contains("server.conf"));
        std::fs::write(&new, "[pool]\nmax_saved = 10\n").unwrap();
        let (config, layers) = load(named);
        let config = config.unwrap();
        assert_eq!((config.pool.max_sandboxes, config.pool.max_saved), (64, 10));
        assert_eq!(
            layers
                .setting("pool.max_sandboxes")
                .unwrap()
                .source
                .to_string(),
            format!("{}:2", old.display())
        );
    }
    // A configuration file that is named is read alone.
    assert_eq!(load(Some(&new)).0.unwrap().pool.max_sandboxes, 256);
    for (text, part) in [
        ("rate = 1\n--rate 5\n", "server.conf:2: "),
        ("state\n", "has no value"),
        ("rate = x\n", "server.rate"),
    ] {
        std::fs::write(&old, text).unwrap();
        let why = load(Some(&old)).0.map(drop).unwrap_err();
        assert!(why.contains(part), "{why}");
    }
    std::fs::write(&old, "# comments only\n").unwrap();
    assert_eq!(load(None).1.deprecation(), None);
    std::fs::remove_file(&old).unwrap();
    assert!(load(Some(&old)).0.is_ok());
    std::fs::remove_file(&new).unwrap();
    assert!(load(Some(&old)).0.unwrap_err().contains("server.conf"));
    assert!(load(None).0.is_ok());
}

/// The documented file with all keys set, and the keys in it.
fn documented() -> (String, Vec<String>) {
    let (mut text, mut keys, mut section) = (String::new(), Vec::new(), "");
    for line in schema::DOCUMENTED.lines() {
        if let Some(name) = line
            .strip_prefix('[')
            .and_then(|line| line.strip_suffix(']'))
        {
            section = name;
        }
        let key = line
            .strip_prefix('#')
            .filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
        let key = key.and_then(|line| Some((line, line.split_once(" = ")?.0)));
        match key {
            Some((line, key)) => {
                keys.push(format!("{section}.{key}"));
                text.push_str(line);
            }
            None => text.push_str(line),
        }
        text.push('\n');
    }
    (text, keys)
}

#[test]
fn the_documented_default_file_has_every_key_with_its_default() {
    let (text, mut keys) = documented();
    let (_dir, path) = written("cube.toml", &text);
    let (_, layers) = args(&["--config", path.to_str().unwrap()]).load().unwrap();
    keys.sort();
    let mut known: Vec<_> = schema::keys()
        .map(|(section, key, _)| format!("{section}.{key}"))
        .collect();
    known.sort();
    assert_eq!(keys, known);
    for (section, key, default) in schema::keys() {
        let key = format!("{section}.{key}");
        let written = serde_json::to_value(&layers.setting(&key).unwrap().value).unwrap();
        let is_set = !default.is_null() && !default.as_array().is_some_and(Vec::is_empty);
        assert!(
            !is_set || *default == written,
            "{key}: {default}, written {written}"
        );
        assert!(schema::example(&key).is_some(), "{key}");
    }
    // As it is installed, the file sets nothing.
    let (_dir, path) = written("cube.toml", schema::DOCUMENTED);
    let (_, layers) = args(&["--config", path.to_str().unwrap()]).load().unwrap();
    assert!(
        schema::keys()
            .all(|(section, key, _)| layers.setting(&format!("{section}.{key}")).is_none())
    );
}

#[test]
fn the_printed_configuration_is_a_configuration_file_with_the_source_of_each_value() {
    let (_dir, path) = written(
        "cube.toml",
        "[server]\ndomain = \"a.test\"\n[alerts]\nrefusals = 5\nto = \"https://h/token\"\n",
    );
    let layers = Layers::load(
        Some(&path),
        Path::new("/no/such/cube.toml"),
        vec![FlagText::of("listen", "[::1]:1".into())],
    );
    let shown = show::text(&layers);
    for line in [
        &format!("domain = \"a.test\"  # {}:2", path.display()),
        "listen = [\"[::1]:1\"]  # --listen",
        "#rate = 500  # default",
        "#reports is not set",
    ] {
        assert!(shown.lines().any(|found| found == line), "{line}: {shown}");
    }
    assert!(
        shown.contains("to = \"***\"") && !shown.contains("token"),
        "{shown}"
    );
    let (_dir, again) = written("cube.toml", &shown);
    let read = Layers::load(Some(&again), Path::new("/no/such/cube.toml"), Vec::new());
    assert_eq!(
        read.config().unwrap().server.domain.as_deref(),
        Some("a.test")
    );
}

fn state_of(line: &str) -> PathBuf {
    match parse(line.split_whitespace().map(Into::into)).unwrap() {
        Command::Serve(args) | Command::Prepare(args) | Command::End(args) => {
            args.load().unwrap().0.server.state
        }
        Command::Reload(state)
        | Command::Key(KeyCommand::New { state, .. })
        | Command::Key(KeyCommand::List { state })
        | Command::Key(KeyCommand::Revoke { state, .. }) => {
            state.find_with(Path::new("/no/such/cube.toml")).unwrap()
        }
        Command::Config(_) | Command::Cluster(_) | Command::Ca(_) => panic!("{line}"),
    }
}

#[test]
fn all_commands_of_the_packaged_unit_use_the_state_directory_of_its_configuration() {
    let (_dir, path) = written("cube.toml", "[server]\nrate = 5\nstate = \"/srv/cube\"\n");
    let unit = include_str!("../../../../dev/packaging/cube-api.service");
    let lines = unit
        .lines()
        .filter_map(|line| line.strip_prefix("Exec")?.split_once('='));
    let lines: Vec<_> = lines.map(|(_, command)| command).collect();
    assert!(lines.len() >= 4, "{lines:?}");
    let own = [
        "cube-api key new n",
        "cube-api key list",
        "cube-api key revoke n",
    ];
    for line in lines.into_iter().chain(own) {
        // Without --config, each of them reads this file.
        assert!(!line.contains("--config"), "{CONFIG_FILE}: {line}");
        let line = format!("{line} --config {}", path.display());
        assert_eq!(state_of(&line), Path::new("/srv/cube"), "{line}");
    }
}

#[test]
fn the_state_directory_is_that_of_the_configuration_file_unless_it_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let usual = dir.path().join("cube.toml");
    let find = |state: Option<&str>, config: Option<PathBuf>| {
        let state = state.map(PathBuf::from);
        StateDir { state, config }.find_with(&usual)
    };
    assert_eq!(find(None, None).unwrap(), Path::new(STATE_DIR));
    std::fs::write(&usual, "[server]\nstate = \"/srv/cube\"\n").unwrap();
    assert_eq!(find(None, None).unwrap(), Path::new("/srv/cube"));
    assert_eq!(find(Some("/x"), None).unwrap(), Path::new("/x"));
    let absent = find(None, Some(dir.path().join("absent.toml")));
    assert!(absent.unwrap_err().to_string().contains("absent"));
}
