//! A report that several machines' jobs write: only the newest holder of the lock can replace the file.
//!
//! `cargo run --example report_file`

use fencelock::ErrorKind;
use fencelock::fence::file::FencedFile;
use std::error::Error;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let dir = std::env::temp_dir().join(format!("fencelock-example-{}", std::process::id()));
    std::fs::create_dir_all(&dir)?;
    let report = FencedFile::new(dir.join("report.csv"))?;
    let locks = fencelock::connect(format!("file:{}", dir.join("locks").display())).await?;

    let a = locks.mutex("report").acquire().await?;
    let old = a.token();
    // A is paused past its lease; B goes on.
    locks.evict("report").await?;
    let b = locks.mutex("report").acquire().await?;
    let token = b.token();
    let file = report.clone();
    // Files block, so this is not for the runtime's own threads.
    tokio::task::spawn_blocking(move || {
        let before = file.raise(token)?;
        let mut text = before.data;
        text.extend_from_slice(b"day,sum\n1,99\n");
        file.replace(token, &text)
    })
    .await??;

    let late = tokio::task::spawn_blocking(move || report.replace(old, b"day,sum\n1,0\n")).await?;
    match late {
        Err(error) if error.kind() == ErrorKind::Fenced => println!("A was refused: {error}"),
        other => return Err(format!("A must be refused: {other:?}").into()),
    }
    println!("{}", std::fs::read_to_string(dir.join("report.csv"))?);
    b.release().await?;
    std::fs::remove_dir_all(dir)?;
    Ok(())
}
