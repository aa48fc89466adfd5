//! Names of any characters: no two of them collide, and all of them come back.

use crate::Subject;
use crate::wait::{eventually, line};
use fencelock::Client;

/// Everything that an encoding could trip over.
fn awkward() -> Vec<String> {
    let mut names: Vec<String> = [
        " ",
        "  ",
        "\t",
        "\n",
        "\r\n",
        "\0",
        "a\0b",
        "\u{1b}[31m",
        "\u{7f}",
        "\u{85}",
        "\u{202e}",
        "\u{feff}",
        ".",
        "..",
        "...",
        "/",
        "//",
        "a/",
        "/a",
        "../a",
        "../../etc/passwd",
        "a/../b",
        "./a",
        "~",
        "-",
        "--help",
        "%",
        "%%",
        "%2F",
        "%2f",
        "%00",
        "%a",
        "{",
        "}",
        "{}",
        "{a}b",
        "a{b}",
        "{{a}}",
        "a",
        "A",
        "ä",
        "Ä",
        "a\u{308}",
        "ß",
        "ss",
        "İ",
        "i",
        "aa",
        "aaa",
        "a:",
        "a:b",
        "a.b",
        "a.lock",
        "a~",
        "a.tmp",
        "*",
        "?",
        "[a]",
        "a b",
        "a  b",
        " a",
        "a ",
        "'",
        "\"",
        "\\",
        "\\n",
        "$HOME",
        "`id`",
        ";",
        "|",
        "&",
        "<",
        ">",
        "#",
        "@",
        "!",
        "=",
        "+",
        ",",
        "con",
        "nul",
        "COM1",
        "🔒",
        "👩‍👩‍👧",
        "日本",
        "null",
        "true",
        "0",
        "00",
        "-1",
        "1e9",
    ]
    .map(String::from)
    .into();
    let long = ["x".repeat(512), "x".repeat(511), "X".repeat(512), "/".repeat(512), "🔒".repeat(128), "\0".repeat(512)];
    names.extend(long);
    names.push(format!("{}y", "x".repeat(511)));
    names.extend((1..=300).step_by(7).map(|length| "p".repeat(length)));
    names
}

/// All of them are held at the same time, each busy for others and only for those who want the same.
pub async fn awkward_names_do_not_collide(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let mut guards = Vec::new();
    for name in awkward() {
        let guard = one.mutex(&name).try_acquire().await.unwrap();
        guards.push(guard.unwrap_or_else(|| panic!("{name:?} collides with another name")));
        assert!(two.mutex(&name).try_acquire().await.unwrap().is_none(), "{name:?}");
        let status = two.status(&name).await.unwrap();
        assert_eq!((status.name.as_str(), status.holders.len()), (name.as_str(), 1));
    }
    assert!(guards.iter().all(fencelock::Guard::is_valid));
    for guard in guards {
        let name = guard.name().to_owned();
        guard.release().await.unwrap();
        assert_eq!(line(&two, &name).await, (0, 0), "{name:?}");
    }
}

async fn names(client: &Client, prefix: &str) -> Vec<String> {
    client.list(prefix).await.unwrap().into_iter().map(|status| status.name).collect()
}

/// The list has all names in use, exactly as they were given, sorted, and forgets those that are free.
pub async fn list_gives_back_every_name_in_order(subject: &Subject) {
    let (one, two) = (subject.client().await, subject.client().await);
    let mut expected = awkward();
    let mut guards = Vec::new();
    for name in &expected {
        let lock = one.rwlock(name);
        let guard = if one.capability().shared { lock.read().await } else { lock.write().await };
        guards.push(guard.unwrap());
    }
    expected.sort();
    assert_eq!(names(&two, "").await, expected);
    drop(guards);
    one.settled().await;
    eventually("the list is empty", async || names(&two, "").await.is_empty()).await;
}

/// A prefix is a prefix of characters, not a pattern and not a path.
pub async fn list_knows_prefixes(subject: &Subject) {
    let client = subject.client().await;
    let mut guards = Vec::new();
    for name in ["a", "a/b", "a/c", "ab", "b", "*", "a*", "%", "{a"] {
        guards.push(client.mutex(name).acquire().await.unwrap());
    }
    for (prefix, expected) in [
        ("a", &["a", "a*", "a/b", "a/c", "ab"][..]),
        ("a/", &["a/b", "a/c"]),
        ("a/c", &["a/c"]),
        ("*", &["*"]),
        ("%", &["%"]),
        ("{", &["{a"]),
        ("A", &[]),
        ("nothing", &[]),
        ("..", &[]),
    ] {
        assert_eq!(names(&client, prefix).await, expected, "prefix {prefix:?}");
    }
}
