"""The page's style: light and dark by the reader's preference, one column on a phone."""

CSS = """
:root{--bg:#fbfbf9;--card:#fff;--ink:#1b1f24;--soft:#5b6470;--edge:#dfe3e8;--off:#b4530a;--on:#1664b0;--good:#166b36;
--bad:#b3202a;color-scheme:light dark}
@media (prefers-color-scheme:dark){:root{--bg:#13161a;--card:#1b1f25;--ink:#e6e9ed;--soft:#9aa4b0;--edge:#323944;
--off:#f0943f;--on:#5fa8f5;--good:#57c785;--bad:#f2777f}}
*{box-sizing:border-box}
body{margin:0 auto;padding:20px 16px 48px;max-width:1060px;background:var(--bg);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,sans-serif}
h1{font-size:1.35rem;margin:0 0 12px}h2{font-size:1.05rem;margin:34px 0 8px}p{margin:6px 0;max-width:72ch}
.soft,small{color:var(--soft)}small{font-size:.82rem}
.verdict{border-left:6px solid var(--good);background:var(--card);padding:12px 16px;border-radius:4px}
.verdict.invalid{border-color:var(--bad)}.verdict b{font-size:1.25rem;color:var(--good)}.verdict.invalid b{color:var(--bad)}
.verdict ul{margin:8px 0 0;padding-left:20px}
.cards{display:grid;margin-bottom:12px;grid-template-columns:repeat(auto-fit,minmax(205px,1fr));gap:12px;margin-top:14px}
.card{background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:12px 14px}
.card .n{font-size:1.65rem;font-weight:650;font-variant-numeric:tabular-nums;line-height:1.2}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
figure{margin:0;background:var(--card);border:1px solid var(--edge);border-radius:8px;padding:10px 12px}
figcaption{font-weight:600;font-size:.93rem;margin-bottom:4px}
svg{width:100%;height:auto;display:block}svg text{fill:var(--soft);font-size:13px}
.grid{stroke:var(--edge);stroke-width:1}.off{fill:var(--off)}.on{fill:var(--on)}.bad{fill:var(--bad)}.wait{opacity:.35}
.line{fill:none;stroke-width:2.5}.line.off{stroke:var(--off)}.line.on{stroke:var(--on)}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin:0 .3em 0 .9em}
.key.off{background:var(--off)}.key.on{background:var(--on)}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums;font-size:.92rem}
th,td{text-align:left;padding:5px 10px 5px 0;border-bottom:1px solid var(--edge);vertical-align:top}
td.n,th.n{text-align:right;white-space:nowrap}.pass{color:var(--good)}.fail{color:var(--bad);font-weight:600}
@media (max-width:600px){svg text{font-size:20px}}
code{font-size:.88em;overflow-wrap:anywhere}
"""
