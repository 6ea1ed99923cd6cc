//! What is said about a release in several files says the same: Cargo.toml is where the version stands. META.json is what
//! PGXN Meta Spec 1.0.0 asks for, and what it names is there.

use serde_json::Value;

fn file(name: &str) -> String {
    let path = format!("{}/../{name}", env!("CARGO_MANIFEST_DIR"));
    std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn version() -> String {
    let manifest = file("Cargo.toml");
    let line = manifest.lines().find(|line| line.starts_with("version = ")).expect("a version");
    line.split('"').nth(1).expect("in quotes").to_string()
}

/// A string that is there and not empty.
#[track_caller]
fn text<'a>(value: &'a Value, path: &str) -> &'a str {
    let text = value.pointer(path).and_then(Value::as_str);
    let text = text.unwrap_or_else(|| panic!("META.json: {path} is no string"));
    assert!(!text.is_empty(), "META.json: {path} is empty");
    text
}

#[test]
fn meta_json_is_what_pgxn_asks_for() {
    let meta: Value = serde_json::from_str(&file("META.json")).expect("META.json is JSON");
    let known = [
        "name",
        "abstract",
        "description",
        "version",
        "maintainer",
        "license",
        "release_status",
        "provides",
        "prereqs",
        "no_index",
        "tags",
        "resources",
        "generated_by",
        "meta-spec",
    ];
    for key in meta.as_object().expect("an object").keys() {
        assert!(known.contains(&key.as_str()), "META.json: {key} is not in the specification");
    }
    assert_eq!(text(&meta, "/name"), "idem");
    text(&meta, "/abstract");
    assert_eq!(text(&meta, "/license"), "postgresql");
    assert_eq!(text(&meta, "/meta-spec/version"), "1.0.0");
    assert!(["stable", "testing", "unstable"].contains(&text(&meta, "/release_status")));
    let maintainers = meta["maintainer"].as_array().expect("a list of maintainers");
    assert!(maintainers.iter().any(|name| name.as_str().is_some_and(|name| !name.is_empty())));
    for tag in meta["tags"].as_array().expect("a list of tags") {
        assert!(tag.as_str().is_some_and(|tag| (1..256).contains(&tag.len())), "{tag}");
    }

    // One version, everywhere.
    let version = version();
    assert_eq!(text(&meta, "/version"), version);
    let provides = meta["provides"].as_object().expect("what is provided");
    assert_eq!(provides.keys().collect::<Vec<_>>(), ["idem"]);
    assert_eq!(text(&meta, "/provides/idem/version"), version);
    file(text(&meta, "/provides/idem/file"));
    file(text(&meta, "/provides/idem/docfile"));
    for directory in meta["no_index"]["directory"].as_array().expect("a list of folders") {
        let path = format!("{}/../{}", env!("CARGO_MANIFEST_DIR"), directory.as_str().unwrap());
        assert!(std::path::Path::new(&path).is_dir(), "{directory} is not there");
    }

    // PostgreSQL's oldest major is the oldest that Cargo.toml has a feature for.
    let manifest = file("Cargo.toml");
    let oldest = (10..30).find(|major| manifest.contains(&format!("\npg{major} = "))).unwrap();
    assert_eq!(text(&meta, "/prereqs/runtime/requires/PostgreSQL"), format!("{oldest}.0.0"));
}

#[test]
fn the_version_is_in_one_place() {
    assert!(file("idem.control").contains("default_version = '@CARGO_VERSION@'"));
    let version = version();
    let changes = file("CHANGELOG.md");
    let newest = changes.lines().find_map(|line| line.strip_prefix("## ")).expect("a release");
    assert_eq!(newest.split_whitespace().next(), Some(version.as_str()), "CHANGELOG.md");
}
