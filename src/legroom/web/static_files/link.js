// Other sites write links as `?model=llama-3.1-8b&gpu=h100`; the page keeps its state after the #, where no server sees it.
if (location.search && !location.hash) history.replaceState(null, "", `${location.pathname}#/plan${location.search}`);
